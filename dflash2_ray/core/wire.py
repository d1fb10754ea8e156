"""Messages between the front of a unit and its step loop as plain values, and back. Pure; it must not know sockets."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dflash2_ray.core.messages import RequestDelta, RequestSpec
from dflash2_ray.core.phase_times import PhaseTimes
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.errors import (
    ContextLengthExceeded,
    DFlash2Error,
    EngineError,
    InvalidRequest,
    Overloaded,
    RequestError,
    StepFailed,
    Stopping,
    UnitLost,
    UnknownModel,
)

_OPTIONAL = ("finish_reason", "stop_reason", "logprobs", "prompt_logprobs", "skipped_reason", "error")
_KINDS: dict[str, type[DFlash2Error]] = {
    kind.__name__: kind
    for kind in (
        ContextLengthExceeded,
        UnknownModel,
        InvalidRequest,
        RequestError,
        Overloaded,
        StepFailed,
        UnitLost,
        Stopping,
    )
}


def pack_spec(spec: RequestSpec) -> dict[str, Any]:
    """Plain values of a request."""
    values = {
        "request_id": spec.request_id,
        "prompt_token_ids": list(spec.prompt_token_ids),
        "output_token_ids": list(spec.output_token_ids),
        "params": asdict(spec.params),
    }
    return {**values, "traced": True} if spec.traced else values


def unpack_spec(values: dict[str, Any]) -> RequestSpec:
    """The request again. Raises InvalidRequest for values that no request can have."""
    return RequestSpec(
        values["request_id"],
        tuple(values["prompt_token_ids"]),
        SamplingParams.from_keywords(**values["params"]),
        tuple(values["output_token_ids"]),
        values.get("traced", False),
    )


def pack_delta(delta: RequestDelta) -> dict[str, Any]:
    """Plain values of a delta, without its stats (the receiver counts `steps`) and without what is not set."""
    values: dict[str, Any] = {
        "request_id": delta.request_id,
        "token_ids": list(delta.token_ids),
        "steps": list(delta.steps),
        "num_speculative_tokens": delta.num_speculative_tokens,
    }
    for name in _OPTIONAL:
        value = getattr(delta, name)
        if value is not None:
            values[name] = value
    if delta.num_cached_tokens:
        values["num_cached_tokens"] = delta.num_cached_tokens
    if delta.phases is not None:
        values["phases"] = delta.phases.pack()
    return values


def unpack_delta(values: dict[str, Any]) -> RequestDelta:
    """The delta again."""
    values = {
        **values,
        "token_ids": tuple(values["token_ids"]),
        "steps": tuple(tuple(step) for step in values["steps"]),
    }
    for name in ("logprobs", "prompt_logprobs"):
        if name in values:
            values[name] = tuple(
                None if one is None else (one[0], tuple((i, p) for i, p in one[1])) for one in values[name]
            )
    if "phases" in values:
        values["phases"] = PhaseTimes.unpack(values["phases"])
    return RequestDelta(**values)


def merge_deltas(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two packed deltas of one request as one."""
    merged = {**first, **second}
    for name in ("token_ids", "steps", "logprobs"):
        if name in merged:
            merged[name] = [*first.get(name, ()), *second.get(name, ())]
    return merged


def ends(item: dict[str, Any]) -> bool:
    """Whether a request has nothing more behind this item."""
    return "refused" in item or item.get("finish_reason") is not None


def merge_items(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One request's packed deltas as one; a refusal or loss drops what came before it: the client asks again for all it has not got."""
    merged: dict[str, Any] = items[0]
    for item in items[1:]:
        merged = item if "refused" in item or "refused" in merged else merge_deltas(merged, item)
    return merged


def pack_error(error: DFlash2Error) -> dict[str, Any]:
    """Plain values of one of our errors."""
    values: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
    if isinstance(error, RequestError):
        values |= {"param": error.param, "code": error.code}
    if isinstance(error, Overloaded):
        values["retry_after_s"] = error.retry_after_s
    return values


def unpack_error(values: dict[str, Any]) -> DFlash2Error:
    """The error again; an unknown kind becomes an EngineError."""
    kind = _KINDS.get(values["kind"], EngineError)
    message = values["message"]
    if issubclass(kind, RequestError):
        return kind(message, param=values.get("param"), code=values.get("code"))
    if issubclass(kind, Overloaded):
        return kind(message, retry_after_s=values.get("retry_after_s", 1.0))
    return kind(message)
