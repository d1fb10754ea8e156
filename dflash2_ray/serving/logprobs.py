"""Log-probabilities in the two shapes of the OpenAI API. It must not know engines."""

from collections.abc import Sequence
from typing import Any

from dflash2_ray.text.tokenizer import Tokenizer


class LogprobsFormat:
    """as_ids: tokens are written `token_id:N`, so that no two look alike."""

    def __init__(self, tokenizer: Tokenizer, *, chat: bool, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._as_ids = as_ids

    def of(self, token_ids: Sequence[int], logprobs: Sequence[Any], offset: int = 0) -> dict[str, Any]:
        """The `logprobs` object of a choice. Entries as in `Generation.logprobs`; None for a prompt's first token. `offset`:
        characters of the choice before these tokens."""
        if self._chat:
            return {
                "content": [self._entry(token, *told) for token, told in zip(token_ids, logprobs, strict=True)],
                "refusal": None,
            }
        texts = [self._text(token) for token in token_ids]
        offsets = []
        for token in token_ids:
            offsets.append(offset)
            offset += len(self._tokenizer.token_text(token))
        tops: list[dict[str, float] | None] = []
        for token, told in zip(token_ids, logprobs, strict=True):
            tops.append(None if told is None else self._by_text(token, *told))
        return {
            "tokens": texts,
            "token_logprobs": [None if told is None else told[0] for told in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def length(self, token_ids: Sequence[int]) -> int:
        """Characters by which offsets grow over these tokens."""
        return sum(len(self._tokenizer.token_text(token)) for token in token_ids)

    def _by_text(self, token: int, own: float, best: Sequence[tuple[int, float]]) -> dict[str, float]:
        found: dict[str, float] = {}
        for other, logprob in best:
            found.setdefault(self._text(other), logprob)  # of tokens that look alike, the more likely one
        if best:
            found.setdefault(self._text(token), own)
        return found

    def _entry(self, token: int, own: float, best: Sequence[tuple[int, float]]) -> dict[str, Any]:
        return {**self._one(token, own), "top_logprobs": [self._one(other, logprob) for other, logprob in best]}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": logprob, "bytes": self._tokenizer.token_bytes(token)}

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)
