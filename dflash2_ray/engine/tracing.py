"""OpenTelemetry spans of one request: one for the whole, one for each phase of each attempt.

The spans of the phases are made when the request ends, from the times that the step loop has added up (`core/phase_times.py`), so a
traced request costs its unit a few additions per step and an untraced one nothing. Phases of decode steps alternate; their spans are
their sums, one behind the other. Where this process has no OpenTelemetry, no tracer provider, or does not sample the request, there
is no trace. It must not know HTTP.
"""

import asyncio
import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dflash2_ray.core.generation import Generation
from dflash2_ray.core.phase_times import PhaseTimes

_ASKED = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
_COUNTED = (
    "num_spec_tokens",
    "num_spec_steps",
    "num_plain_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "mean_acceptance_length",
    "skipped_reason",
)


@dataclass(frozen=True, slots=True)
class TraceOrigin:
    """Where a request came in. carrier: its W3C headers (traceparent, tracestate), by lower-case names."""

    operation: str
    model: str
    carrier: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Attempt:
    started_ns: int
    phases: PhaseTimes | None = None


class RequestTrace:
    """The spans of one request. Made by `traced`."""

    def __init__(self, api: Any, tracer: Any, span: Any) -> None:
        self._api, self._tracer, self._span = api, tracer, span
        self._attempts: list[_Attempt] = []

    def asked(self, sampling: Mapping[str, Any]) -> None:
        """Note what was asked for; options without a number are left out."""
        for name in _ASKED:
            if isinstance(sampling.get(name), (int, float)):
                self._span.set_attribute(f"gen_ai.request.{name}", sampling[name])

    def attempt(self) -> None:
        """The request goes to a unit, for the first time or again."""
        self._attempts.append(_Attempt(time.time_ns()))

    def heard(self, item: Mapping[str, Any] | None) -> None:
        """A packed delta of the present attempt; its times are those since the attempt began."""
        if item is not None and "phases" in item:
            self._attempts[-1].phases = PhaseTimes.unpack(item["phases"])

    def answered(self, generation: Generation) -> None:
        """Note what came of it."""
        speculation, timing = generation.metrics["speculative_decoding"], generation.metrics["timing"]
        values = {
            "gen_ai.response.id": generation.request_id,
            "gen_ai.response.finish_reasons": [generation.finish_reason],
            "gen_ai.usage.input_tokens": generation.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": generation.usage.completion_tokens,
            "dflash2.time_to_first_token_s": timing["time_to_first_token_s"],
            "dflash2.num_resumes": generation.metrics["num_resumes"],
            **{f"dflash2.{name}": speculation[name] for name in _COUNTED if speculation[name] is not None},
        }
        self._span.set_attributes(values)

    def failed(self, error: BaseException) -> None:
        """Note the error by its kind; its words may be the user's. A client that leaves is no error."""
        if isinstance(error, (GeneratorExit, asyncio.CancelledError)):
            self._span.set_attribute("dflash2.cancelled", True)
            return
        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(self._api.Status(self._api.StatusCode.ERROR))

    def end(self) -> None:
        """End the request's span, and make those of its phases."""
        ended_ns = time.time_ns()
        inside = self._api.set_span_in_context(self._span)
        limits = [*(attempt.started_ns for attempt in self._attempts[1:]), ended_ns]
        for number, (attempt, limit_ns) in enumerate(zip(self._attempts, limits, strict=True)):
            at = attempt.started_ns
            for name, seconds, num_steps in _phases(attempt.phases):
                until = max(at, min(at + round(seconds * 1e9), limit_ns))
                attributes = {"dflash2.attempt": number, "dflash2.duration_s": seconds, "dflash2.num_steps": num_steps}
                self._tracer.start_span(name, context=inside, start_time=at, attributes=attributes).end(until)
                at = until
        self._span.end(ended_ns)


def _phases(times: PhaseTimes | None) -> Iterator[tuple[str, float, int]]:
    """(name, seconds, steps) of the phases that there were; none of an attempt that brought no token."""
    if times is None:
        return
    yield "queue", times.queue_s, 0
    yield "prefill", times.prefill_s, times.num_prefill_steps
    if times.num_draft_steps:
        yield "draft", times.draft_s, times.num_draft_steps
        yield "transfer", times.transfer_s, times.num_draft_steps
    if times.num_decode_steps:
        yield "verify", times.verify_s, times.num_decode_steps


@contextmanager
def traced(request_id: str, origin: TraceOrigin | None) -> Iterator[RequestTrace | None]:
    """Trace what happens inside; None where it is not to be traced. The parent is the span in hand, else the origin's."""
    trace = _start(request_id, origin)
    if trace is None:
        yield None
        return
    try:
        yield trace
    except BaseException as error:
        trace.failed(error)
        raise
    finally:
        trace.end()


def _start(request_id: str, origin: TraceOrigin | None) -> RequestTrace | None:
    api = _api()
    if api is None:
        return None
    parent = None  # the span in hand
    if origin is not None and not api.get_current_span().get_span_context().is_valid:
        parent = _propagator().extract(origin.carrier)
    tracer = api.get_tracer("dflash2_ray")
    operation = origin.operation if origin else "generate_content"
    kind = api.SpanKind.SERVER if origin else api.SpanKind.CLIENT
    span = tracer.start_span(f"{operation} {origin.model}" if origin else operation, context=parent, kind=kind)
    if not span.is_recording():
        return None
    span.set_attributes(
        {"gen_ai.provider.name": "dflash2_ray", "gen_ai.operation.name": operation, "dflash2.request_id": request_id}
    )
    if origin:
        span.set_attribute("gen_ai.request.model", origin.model)
    return RequestTrace(api, tracer, span)


@functools.cache
def _api() -> Any:
    """`opentelemetry.trace`, None where it is not installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace


@functools.cache
def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
