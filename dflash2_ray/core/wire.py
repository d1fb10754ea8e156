"""Messages between the front of a unit and its step loop as plain values, and back. Pure; it must not know sockets."""

from dataclasses import asdict
from typing import Any

from dflash2_ray.core.messages import RequestDelta, RequestSpec
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

_KINDS: dict[str, type[DFlash2Error]] = {
    kind.__name__: kind
    for kind in (ContextLengthExceeded, UnknownModel, InvalidRequest, RequestError, Overloaded, StepFailed, UnitLost, Stopping)
}


def pack_spec(spec: RequestSpec) -> dict[str, Any]:
    """Plain values of a request."""
    return {
        "request_id": spec.request_id,
        "prompt_token_ids": list(spec.prompt_token_ids),
        "output_token_ids": list(spec.output_token_ids),
        "params": asdict(spec.params),
    }


def unpack_spec(values: dict[str, Any]) -> RequestSpec:
    """The request again. Raises InvalidRequest for values that no request can have."""
    return RequestSpec(
        values["request_id"],
        tuple(values["prompt_token_ids"]),
        SamplingParams.from_keywords(**values["params"]),
        tuple(values["output_token_ids"]),
    )


def pack_delta(delta: RequestDelta) -> dict[str, Any]:
    """Plain values of a delta."""
    return {
        "request_id": delta.request_id,
        "token_ids": list(delta.token_ids),
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
        "stats": delta.stats,
        "error": delta.error,
    }


def unpack_delta(values: dict[str, Any]) -> RequestDelta:
    """The delta again."""
    return RequestDelta(**{**values, "token_ids": tuple(values["token_ids"])})


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
