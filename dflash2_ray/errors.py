"""The error taxonomy: every error that a user can meet, and the one table that maps them to HTTP.

Each message says what is wrong, which key, tensor or field, what was expected and what was got.
This module knows nothing of the rest of the project.
"""

from dataclasses import dataclass


class DFlash2Error(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(DFlash2Error):
    """The configuration cannot be served. Start-up stops with exit code 2."""


class CheckpointError(ConfigError):
    """A checkpoint is missing, broken, or made for another target."""


class RequestError(DFlash2Error):
    """The client's fault; the request was refused and nothing else was disturbed.

    `param` names the field of the request, `code` is the OpenAI error code (both may be None).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_request_error, (type(self), self.message, self.param, self.code))


def _rebuild_request_error(kind: type[RequestError], message: str, param: str | None, code: str | None) -> RequestError:
    """Rebuild a request error after it crossed a process boundary by pickle."""
    error = kind.__new__(kind)
    RequestError.__init__(error, message, param=param, code=code)
    return error


class InvalidRequest(RequestError):
    """A field has a bad value or type, or the fields contradict each other."""


class ContextLengthExceeded(RequestError):
    """The prompt does not leave room for one token."""

    def __init__(
        self, message: str, *, param: str | None = "prompt", code: str | None = "context_length_exceeded"
    ) -> None:
        super().__init__(message, param=param, code=code)


class UnknownModel(RequestError):
    """The request names a model that is not served."""

    def __init__(self, message: str, *, param: str | None = "model", code: str | None = "model_not_found") -> None:
        super().__init__(message, param=param, code=code)


class Overloaded(DFlash2Error):
    """The queue is full; the client should retry after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_overloaded, (self.message, self.retry_after_s))


def _rebuild_overloaded(message: str, retry_after_s: float) -> Overloaded:
    return Overloaded(message, retry_after_s=retry_after_s)


class EngineError(DFlash2Error):
    """The service's own fault. Clients see a fixed sentence and the request id, never this text."""


class StepFailed(EngineError):
    """A step raised; the requests that took part in it are lost."""


class UnitLost(EngineError):
    """A target rank or the whole unit went away."""


class DeadlinePassed(EngineError):
    """The request took longer than it may."""


class Stopping(EngineError):
    """The service is draining and takes no new request."""


@dataclass(frozen=True)
class HttpError:
    """How one kind of error is told to an HTTP client (OpenAI error object)."""

    status: int
    type: str
    code: str | None
    message: str | None = None  # None: the error's own text may be shown


HTTP_TABLE: tuple[tuple[type[DFlash2Error], HttpError], ...] = (
    (ContextLengthExceeded, HttpError(400, "invalid_request_error", "context_length_exceeded")),
    (UnknownModel, HttpError(404, "invalid_request_error", "model_not_found")),
    (InvalidRequest, HttpError(400, "invalid_request_error", None)),
    (RequestError, HttpError(400, "invalid_request_error", None)),
    (Overloaded, HttpError(429, "rate_limit_error", "queue_full")),
    (StepFailed, HttpError(500, "server_error", None, "The engine failed on this request.")),
    (UnitLost, HttpError(503, "server_error", "service_unavailable", "The engine was lost and is being replaced.")),
    (DeadlinePassed, HttpError(504, "server_error", "timeout", "The request took longer than request_timeout_s.")),
    (Stopping, HttpError(503, "server_error", "service_unavailable", "The service is stopping.")),
    (DFlash2Error, HttpError(500, "server_error", None, "The service failed on this request.")),
)


def http_error(error: BaseException) -> HttpError:
    """The HTTP form of `error`: first matching row of `HTTP_TABLE`; anything unknown is a plain 500."""
    for kind, row in HTTP_TABLE:
        if isinstance(error, kind):
            return row
    return HttpError(500, "server_error", None, "The service failed on this request.")
