"""The header `openai-processing-ms`: how long an answer took to begin."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ProcessingTime:
    """ASGI middleware; a stream is timed up to its headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                spent = str(int((time.perf_counter() - started) * 1000)).encode()
                message = {**message, "headers": [*message.get("headers", ()), (b"openai-processing-ms", spent)]}
            await send(message)

        await self._app(scope, receive, timed)
