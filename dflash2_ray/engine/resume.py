"""What a client remembers so that its request can go on after a unit was lost: the tokens it has, and until when to try.

Every draw is keyed by (seed, absolute position), so a unit that is given prompt and tokens so far goes on as if nothing had
happened. Pure bookkeeping; it must not know ray.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dflash2_ray.core.generation import GenerationChunk
from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.wire import pack_spec, unpack_delta, unpack_error
from dflash2_ray.errors import DFlash2Error, Overloaded, Stopping, UnitLost
from dflash2_ray.text.assembly import TextAssembler

_PAUSE_S = 0.2  # between attempts, when a unit refuses at once


class ResumableRequest:
    """One request over any number of attempts. `timeout_s` runs from a loss to the next token."""

    def __init__(
        self, spec: RequestSpec, assembler: TextAssembler, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec = spec
        self._assembler = assembler
        self._timeout_s = timeout_s
        self._clock = clock
        self._lost_at: float | None = None
        self._num_losses = 0
        self._loss: DFlash2Error | None = None
        self.begun = False  # the client has its first token
        self.finished = False  # the client has its whole text
        self.ended = False  # the engine has nothing more of it

    def attempt(self) -> dict[str, Any]:
        """The request to send: prompt and the tokens that the client already has, as plain values."""
        return pack_spec(self._spec)

    def absorb(self, item: dict[str, Any] | None) -> GenerationChunk:
        """A unit's next item as a chunk. Raises UnitLost or Stopping (try again behind `lost`), or the request's own error."""
        if item is None:
            raise UnitLost("the stream ended early")
        if "refused" in item:
            raise unpack_error(item["refused"])
        delta = unpack_delta(item)
        self.ended = delta.finish_reason is not None
        if delta.finish_reason == "error":
            raise unpack_error(delta.error or {"kind": "StepFailed", "message": "the step failed"})
        self._lost_at = None
        self._spec = replace(self._spec, output_token_ids=(*self._spec.output_token_ids, *delta.token_ids))
        if delta.prompt_logprobs is not None:  # told once
            self._spec = replace(self._spec, params=replace(self._spec.params, prompt_logprobs=None))
        chunk = self._assembler.push(delta)
        self.begun = True
        self.finished = chunk.finish_reason is not None
        if chunk.generation is not None:
            chunk.generation.metrics["num_resumes"] = self._num_losses
        return chunk

    def lost(self, error: DFlash2Error) -> float:
        """Note a loss; seconds to wait before the next attempt. Raises `error` when it is final or the time is over."""
        resumable = isinstance(error, (UnitLost, Stopping)) or (
            isinstance(error, Overloaded) and self._lost_at is not None
        )
        if not resumable:
            raise error
        now = self._clock()
        self._loss = error
        if self._lost_at is None:
            self._lost_at = now
            self._num_losses += 1
            return 0.0 if self._timeout_s > 0 else self._give_up()
        return self._give_up() if now - self._lost_at >= self._timeout_s else _PAUSE_S

    def _give_up(self) -> float:
        assert self._loss is not None, "only a loss ends an attempt"
        raise self._loss

    @property
    def patience_s(self) -> float | None:
        """How long the next item may take: None while nothing is lost."""
        return None if self._lost_at is None else max(0.1, self._lost_at + self._timeout_s - self._clock())
