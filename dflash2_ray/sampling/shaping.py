"""What the options of one request do to the target's logits before temperature, row by row inside a draft block.

Row j of a block is shaped by the output so far and the drafts before slot j, never by the draft in slot j: what plain decoding
would do behind that very text. Order and meaning are vLLM's: allowed tokens, bad words, grammar, min_tokens and logit_bias, then
penalties (repetition over prompt and output, presence and frequency over the output). It must not know requests or steps.

Shapes: n rows of one request (anchor and n - 1 drafts), V vocabulary.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

_OUT = float("-inf")


class Grammar(Protocol):
    """A form that the output must match (`sampling.grammar.GrammarState`)."""

    def shape(self, logits: torch.Tensor, output: Sequence[int], drafts: Sequence[int]) -> None:
        """Set what may not follow to -inf: logits fp32 [n, V], in place."""


class LogitShaper:
    """One per request that shapes its logits. It keeps counts of what it has seen: outputs only ever grow.

    logit_bias: (token id, bias) pairs. allowed_token_ids: None allows all. bad_words: token sequences that are never completed.
    min_tokens: no token of `ending_token_ids` among so many first ones.
    """

    def __init__(
        self,
        *,
        prompt: Sequence[int] = (),
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Sequence[tuple[int, float]] = (),
        allowed_token_ids: Sequence[int] | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        min_tokens: int = 0,
        ending_token_ids: Iterable[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self._presence = presence_penalty
        self._frequency = frequency_penalty
        self._repetition = repetition_penalty
        self._bias_ids = [token for token, _ in logit_bias]
        self._biases = [bias for _, bias in logit_bias]
        self._allowed = None if allowed_token_ids is None else sorted(set(allowed_token_ids))
        self._bad_words = [tuple(word) for word in bad_words if word]
        self._min_tokens = min_tokens
        self._ending = sorted(ending_token_ids)
        self._grammar = grammar
        self._penalises = bool(presence_penalty or frequency_penalty or repetition_penalty != 1.0)
        self._in_prompt = frozenset(prompt) if repetition_penalty != 1.0 else frozenset()
        self._counts: Counter[int] = Counter()
        self._num_counted = 0

    def shape(self, logits: torch.Tensor, output: Sequence[int], drafts: Sequence[int]) -> None:
        """Shape the rows of one block in place: logits fp32 [len(drafts) + 1, V]; output: the committed tokens behind the prompt."""
        if self._allowed is not None:
            kept = logits[:, self._allowed]
            logits.fill_(_OUT)
            logits[:, self._allowed] = kept
        for row in range(len(drafts) + 1) if self._bad_words else ():
            gone = self._completing([*output[max(0, len(output) - self._reach) :], *drafts[:row]])
            if gone:
                logits[row, gone] = _OUT
        if self._grammar is not None:
            self._grammar.shape(logits, output, drafts)
        if self._ending and len(output) < self._min_tokens:
            logits[: self._min_tokens - len(output), self._ending] = _OUT
        if self._bias_ids:
            logits[:, self._bias_ids] += torch.tensor(self._biases, dtype=logits.dtype, device=logits.device)
        if self._penalises:
            self._penalise(logits, output, drafts)

    @property
    def _reach(self) -> int:
        return max(len(word) for word in self._bad_words) - 1

    def _completing(self, text: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word behind `text`."""
        return [
            word[-1]
            for word in self._bad_words
            if tuple(text[len(text) - len(word) + 1 :]) == word[:-1] and len(text) >= len(word) - 1
        ]

    def _penalise(self, logits: torch.Tensor, output: Sequence[int], drafts: Sequence[int]) -> None:
        assert len(output) >= self._num_counted, "outputs only grow"
        self._counts.update(output[self._num_counted :])
        self._num_counted = len(output)
        ids = sorted(self._in_prompt | self._counts.keys())
        distinct = list(dict.fromkeys(drafts))
        raw = logits[:, distinct]  # a copy, from before any penalty
        if ids:
            logits[:, ids] = self._penalised(logits[:, ids], [float(self._counts.get(token, 0)) for token in ids])
        rows, columns, counts = [], [], []
        for row in range(1, len(drafts) + 1):  # behind drafts, these tokens have occurred more often than in the output
            seen = Counter(drafts[:row])
            for column, token in enumerate(distinct):
                if token in seen:
                    rows.append(row)
                    columns.append(column)
                    counts.append(float(self._counts.get(token, 0) + seen[token]))
        if rows:
            logits[rows, [distinct[column] for column in columns]] = self._penalised(raw[rows, columns], counts)

    def _penalised(self, logits: torch.Tensor, occurrences: Sequence[float]) -> torch.Tensor:
        """Logits [..., m] of tokens that occur in prompt or output, so often in the output."""
        counts = torch.tensor(occurrences, dtype=logits.dtype, device=logits.device)
        if self._repetition != 1.0:
            logits = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
        return logits - self._frequency * counts - self._presence * (counts > 0).to(logits.dtype)
