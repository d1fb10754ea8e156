"""The logit shapers of the requests in flight, and what verification needs of them. One per rank 0."""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from dflash2_ray.core.failure_log import FailureLog
from dflash2_ray.core.request import Request
from dflash2_ray.errors import DFlash2Error, InvalidRequest, StepFailed
from dflash2_ray.sampling.shaping import Grammar, LogitShaper

failure_log = FailureLog(logging.getLogger(__name__))


class Grammars(Protocol):
    """Makes the state of one constrained request from its grammar."""

    def __call__(self, grammar: str) -> Grammar: ...


class Shapers:
    """`grammars`: None where outputs cannot be constrained (no tokenizer)."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._shapers: dict[str, LogitShaper] = {}

    @property
    def constrains(self) -> bool:
        """Whether grammars can be run."""
        return self._grammars is not None

    def shape(
        self, logits: torch.Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, dict[int, DFlash2Error]]:
        """The logits that decide, and which of their rows cannot: logits [T, V] fp32, one block after the other; by row, why.

        The given logits are left as they are, and returned where no request has options. What fails for one request fails for it
        alone.
        """
        shaped, dead = logits, {}
        start = 0
        for request, own in zip(requests, drafts, strict=True):
            end = start + len(own) + 1
            if request.params.shapes_logits:
                if shaped is logits:
                    shaped = logits.clone()
                rows = shaped[start:end]
                for row, error in self._lost_rows(request, rows, own).items():
                    rows[row] = 0.0  # a distribution all the same: what is drawn from it is not used
                    dead[start + row] = error
            start = end
        return shaped, dead

    def _lost_rows(self, request: Request, rows: torch.Tensor, drafts: Sequence[int]) -> dict[int, DFlash2Error]:
        """Shape the rows of one request; those that leave no token to emit, and why."""
        try:
            self._of(request).shape(rows, request.output_token_ids, drafts)
        except DFlash2Error as error:
            return dict.fromkeys(range(len(rows)), error)
        except Exception as error:  # a library's own: it must not end the step of the others
            failure_log.exception(
                "request %s: its options could not be applied", request.request_id, request_id=request.request_id
            )
            return dict.fromkeys(range(len(rows)), StepFailed(f"{type(error).__name__}"))
        excluded = InvalidRequest(
            "the options exclude every token at this position", param=request.params.excluding_option
        )
        return {row: excluded for row, best in enumerate(rows.amax(-1).tolist()) if best == float("-inf")}

    def _of(self, request: Request) -> LogitShaper:
        shaper = self._shapers.get(request.request_id)
        if shaper is None:
            params = request.params
            assert params.grammar is None or self._grammars is not None, "admission refuses grammars that cannot be run"
            shaper = LogitShaper(
                prompt=request.token_ids[: request.num_prompt_tokens],
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=params.repetition_penalty,
                logit_bias=params.logit_bias,
                allowed_token_ids=params.allowed_token_ids,
                bad_words=params.bad_words_token_ids,
                min_tokens=params.min_tokens,
                ending_token_ids=request.ending_token_ids,
                grammar=self._grammars(params.grammar) if params.grammar is not None and self._grammars else None,
            )
            self._shapers[request.request_id] = shaper
        return shaper

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request; one that goes on after all starts again."""
        self._shapers.pop(request_id, None)
