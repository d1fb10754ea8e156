"""No request body larger than the limit is read: by its announced length, or by counting what arrives."""

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash2_ray.serving.openai_api import plain_error


class BodyTooLarge(Exception):
    """Raised inside the application when a body without a length passes the limit."""


class BodyLimit:
    """ASGI middleware: 413 in the OpenAI form."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"")
        if announced.isdigit() and int(announced) > self._max_bytes:
            return await self._refuse(scope, receive, send)
        num_bytes = 0
        exceeded = started = False

        async def counted() -> Message:
            nonlocal num_bytes, exceeded
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                exceeded = True
                raise BodyTooLarge
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            if not exceeded or started:  # whatever the application makes of it, the answer is ours
                started = True
                await send(message)

        try:
            await self._app(scope, counted, noted)
        except BodyTooLarge:
            if started:
                raise
        if exceeded and not started:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body is larger than max_body_bytes={self._max_bytes}"
        await JSONResponse(plain_error(message, "invalid_request_error", None, "request_too_large"), 413)(
            scope, receive, send
        )
