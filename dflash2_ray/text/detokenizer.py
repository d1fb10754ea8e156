"""Incremental detokenisation: text as tokens arrive, never half a character.

A character may span tokens, so text whose end is incomplete is held back until the tokens that complete it arrive, or
the end. Tokens are decoded together with those before them, because some decoders treat the first token of a run in
another way. The pieces, joined, are the text of all tokens decoded at once.
"""

from collections.abc import Sequence

from dflash2_ray.text.tokenizer import REPLACEMENT, Tokenizer


class Detokenizer:
    """One per stream."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._settled: list[int] = []  # the last run of tokens whose text is out: context for what follows
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that `token_ids` complete; empty while a character is incomplete."""
        self._pending.extend(token_ids)
        return self._take(hold_back=True)

    def finish(self) -> str:
        """What is left at the end of the stream, U+FFFD for bytes that never became a character."""
        return self._take(hold_back=False)

    def _take(self, hold_back: bool) -> str:
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._settled, self._skip)
        both = self._tokenizer.decode(self._settled + self._pending, self._skip)
        if hold_back and both.endswith(REPLACEMENT):
            return ""
        if len(both) > len(before):  # special tokens bring no text and are no context
            self._settled = self._pending
        self._pending = []
        return both[len(before) :]
