"""A checkpoint's vocabulary as grammars see it: the bytes of every token, which are special, which end a text.

Tokens come as bytes from llguidance's own reading of `tokenizer.json`, but the vocabulary is handed over as a table, not
as that file. The library takes every added token for special and still finds it in forced text, so that it allows tokens
that it refuses one call later (`<tool_call>`, or an end token inside a constant). Here an added token is ordinary text
unless the checkpoint marks it `special`, and text is never tokenised to special tokens.
"""

import threading
from collections.abc import Iterable
from pathlib import Path

import llguidance
import tokenizers

from dflash2_ray.errors import CheckpointError, InvalidRequest


class GrammarVocabulary:
    """tokenizer_json: path of the file. vocab_size: columns V of the logits; rows without a token are never allowed.

    eos_token_ids: every token that ends a text. Reads nothing before `tokenizer()` or `prepare()`.
    """

    def __init__(self, tokenizer_json: Path | str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(sorted({token for token in eos_token_ids if 0 <= token < vocab_size}))
        self._path = Path(tokenizer_json)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Read the tokenizer now (about a second for 150,000 tokens) instead of at the first constrained request."""
        self.tokenizer()

    def tokenizer(self) -> llguidance.LLTokenizer:
        """llguidance's tokenizer, built once, by whichever thread comes first.

        Raises InvalidRequest when this model's tokens cannot be constrained, CheckpointError when the file is unreadable.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._build()
            return self._tokenizer

    def _build(self) -> llguidance.LLTokenizer:
        if not self.eos_token_ids:
            raise InvalidRequest(
                "response_format: this model has no token that ends a text, so its output cannot be constrained"
            )
        try:
            text = self._path.read_text(encoding="utf-8")
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises a bare Exception
            raise CheckpointError(f"tokenizer: {self._path} cannot be read: {error}") from None
        try:
            table = _TokenTable(
                backend, llguidance.LLTokenizer(text, eos_token=self.eos_token_ids[0]), self.eos_token_ids[0]
            )
            size = max(self.vocab_size, len(table.tokens))
            return llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(table), n_vocab=size, eos_token=list(self.eos_token_ids)
            )
        except Exception as error:  # kinds of tokenizers that llguidance does not know
            raise InvalidRequest(f"response_format: this model's tokenizer cannot be constrained: {error}") from None


class _TokenTable:
    """What `llguidance.TokenizerWrapper` asks for. tokens[i]: bytes of token i, empty where the checkpoint has none."""

    bos_token_id = None

    def __init__(self, backend: tokenizers.Tokenizer, own: llguidance.LLTokenizer, eos_token_id: int) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # text that reads like a special token is text
        self._backend = backend
        self._own = own
        added = backend.get_added_tokens_decoder()
        size = 1 + max([*backend.get_vocab(with_added_tokens=True).values(), *added])
        known = [backend.id_to_token(token) is not None for token in range(size)]
        self.tokens = [own.decode_bytes([token]) if known[token] else b"" for token in range(size)]
        self.special_token_ids = sorted(token for token, kind in added.items() if kind.special)
        self.eos_token_id = eos_token_id

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of text that a grammar forces: the tokenizer's own, or the longest matches where those add or change bytes."""
        if not isinstance(text, str):
            raise TypeError("expected text")  # so the wrapper asks with text only
        token_ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        if b"".join(self.tokens[token] for token in token_ids) == text.encode():
            return token_ids
        return list(self._own.greedy_tokenize(text))
