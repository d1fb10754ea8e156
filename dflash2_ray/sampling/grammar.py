"""The state of one constrained request: which tokens its grammar allows behind the output and behind each draft.

Masks are a function of grammar, output and drafts alone: whatever the matcher had taken in before (drafts that were rejected,
another output before a preemption) is rolled back first. End tokens never reach the matcher; they are decided here. It must
not know probabilities. Shapes: T rows (the anchor's and one per draft), V columns of the logits.
"""

from collections.abc import Sequence

import llguidance
import numpy as np
import torch

from dflash2_ray.errors import EngineError, InvalidRequest
from dflash2_ray.sampling.grammar_vocabulary import GrammarVocabulary

_STUCK = ("NoExtension", "NoExtensionBias")  # llguidance's words for: nothing in the vocabulary continues the text

__all__ = ["GrammarState", "GrammarVocabulary", "constrain"]


class GrammarState:
    """grammar: serialised for llguidance (`text/response_format.py`, `text/tool_grammar.py`).

    param: the request's field that asked for it. Raises InvalidRequest when it does not compile for this vocabulary.
    """

    def __init__(self, vocabulary: GrammarVocabulary, grammar: str, *, param: str = "response_format") -> None:
        self._param = param
        self._vocab_size = vocabulary.vocab_size
        self._eos = frozenset(vocabulary.eos_token_ids)
        self._eos_ids = np.array(vocabulary.eos_token_ids, dtype=np.int64)
        self._new_matcher = lambda: llguidance.LLMatcher(vocabulary.tokenizer(), grammar, log_level=0)
        self._matcher = self._new_matcher()
        self._consumed: list[int] = []  # what the matcher stands behind; holds no end token
        if self._matcher.is_error():
            raise InvalidRequest(f"{param}: the grammar cannot be used: {_first_line(self._matcher)}", param=param)

    def masks(self, output_token_ids: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """Allowed tokens: bool [1 + len(drafts), V] on the CPU; row 0 stands behind the output, row i behind i drafts.

        Where the grammar is complete every end token is allowed, with whatever may still follow. Where it is stuck (no token
        of this vocabulary continues it), and behind an end token, only end tokens are. Rows behind a draft that its
        own row refuses allow everything (behind an end token: end tokens): that draft has no probability, nobody looks at them.

        Raises InvalidRequest when the grammar exceeds llguidance's limits here, EngineError for an output that it does not allow.
        """
        output, drafts = list(output_token_ids), list(drafts)
        try:
            return self._masks(output, drafts)
        except _MatcherFailed:  # its limits count what it ever saw: only a fresh one may decide
            self._restart()
        try:
            return self._masks(output, drafts)
        except _TooComplex as error:
            self._restart()
            raise InvalidRequest(f"{self._param}: the grammar is too complex: {error}", param=self._param) from None
        except _MatcherFailed as error:
            self._restart()
            raise EngineError(f"grammar: {error} (output of {len(output)} tokens, {len(drafts)} drafts)") from None

    def shape(self, logits: torch.Tensor, output_token_ids: Sequence[int], drafts: Sequence[int]) -> None:
        """Set what the grammar does not allow to -inf, in place: logits fp32 [1 + len(drafts), V]. Raises as `masks`."""
        constrain(logits, self.masks(output_token_ids, drafts))

    def _masks(self, output: list[int], drafts: list[int]) -> torch.Tensor:
        allowed = np.ones((1 + len(drafts), self._vocab_size), dtype=np.bool_)
        ended = self._follow(output)
        taken = 0
        for row, draft in enumerate([*drafts, None]):
            if ended:
                allowed[row:] = False
                allowed[row:, self._eos_ids] = True
                break
            self._fill(allowed[row])
            if draft is None or not allowed[row, draft]:
                break
            ended = draft in self._eos
            if not ended:
                self._consume([draft])
                taken += 1
        if self._matcher.is_error():  # stuck: the library calls that an error, and its matcher never leaves it
            self._restart()
        elif taken and not self._matcher.rollback(taken):
            raise _MatcherFailed(f"cannot roll back {taken} drafts")
        return torch.from_numpy(allowed)

    def _follow(self, output: list[int]) -> bool:
        """Bring the matcher behind `output`, from wherever it is. True when an end token is in it."""
        have = len(self._consumed)
        if output[:have] != self._consumed:
            keep = next(
                (i for i, pair in enumerate(zip(output, self._consumed, strict=False)) if pair[0] != pair[1]),
                len(output),
            )
            if not self._matcher.rollback(have - keep):
                raise _MatcherFailed(f"cannot roll back {have - keep} tokens")
            del self._consumed[keep:]
            have = keep
        fresh = output[have:]
        end = next((i for i, token in enumerate(fresh) if token in self._eos), None)
        fresh = fresh[:end]
        if fresh:
            self._consume(fresh)
            self._consumed += fresh
        return end is not None

    def _consume(self, tokens: list[int]) -> None:
        count = self._matcher.try_consume_tokens(tokens)
        if count != len(tokens):
            if self._matcher.is_error():
                raise _TooComplex(_first_line(self._matcher))
            raise _MatcherFailed(f"the grammar does not allow token {tokens[count]}")

    def _fill(self, row: np.ndarray) -> None:
        """Write the mask behind what the matcher has: bool [V], in place."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        width = min(len(bits), len(row))
        row[:width] = bits[:width]
        row[width:] = False
        accepting = self._matcher.is_accepting()
        if self._matcher.is_error():
            if _first_line(self._matcher) not in _STUCK:
                raise _TooComplex(_first_line(self._matcher))
            row[:] = False
        row[self._eos_ids] = False
        if accepting or not row.any():
            row[self._eos_ids] = True

    def _restart(self) -> None:
        self._matcher = self._new_matcher()
        self._consumed = []


def constrain(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Set what is not allowed to -inf, in place: logits fp32 [T, V], allowed bool [T, V] (any device)."""
    return logits.masked_fill_(~allowed.to(logits.device), float("-inf"))


class _MatcherFailed(Exception):
    """The matcher is of no more use, or the tokens do not fit its grammar."""


class _TooComplex(_MatcherFailed):
    """The matcher ran into its limits."""


def _first_line(matcher: llguidance.LLMatcher) -> str:
    return matcher.get_error().split("\n", 1)[0][:200]
