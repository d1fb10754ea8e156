"""What becomes of an error that no route expected: an answer in the OpenAI form, and a log line without a word of the user's."""

import logging
import traceback

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash2_ray.core.failure_log import FailureLog
from dflash2_ray.errors import DFlash2Error
from dflash2_ray.serving.openai_api import error_body
from dflash2_ray.serving.request_id import request_id_of

failure_log = FailureLog(logging.getLogger("ray.serve"))


def failure(
    error: BaseException, request_id: str, *, chat: bool = False
) -> tuple[int, dict[str, object], dict[str, str]]:
    """(status, body, headers) of an error; what is not the client's fault is logged, one cause once (`core.failure_log`). Only our own errors are logged in words:
    any other may quote a prompt, so its kind and where it was raised have to do."""
    status, body, headers = error_body(error, request_id, chat=chat)
    if status >= 500:
        cause = described(error)
        failure_log.error("request %s: %s", request_id, cause, kind=cause, request_id=request_id)
    return status, body, headers


def described(error: BaseException) -> str:
    """One line: our own errors in words, any other by its kind and the frames it came through."""
    if isinstance(error, DFlash2Error):
        return f"{type(error).__name__}: {error}"
    frames = (f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__} at {' < '.join(reversed(list(frames)))}"


class CatchAll:
    """ASGI middleware next to the routes: what they raise is answered here. Nothing of it reaches the server, which would log it word for word."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if scope["type"] != "http":
                raise
            status, body, headers = failure(error, request_id_of(Request(scope)))
            if not started:
                await JSONResponse(body, status, headers=headers)(scope, receive, send)
