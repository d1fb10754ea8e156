"""No generation is asked for where all units are known to be full: it is refused before its body is read."""

from collections.abc import Callable, Collection

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash2_ray.errors import Overloaded
from dflash2_ray.serving.failures import failure
from dflash2_ray.serving.request_id import request_id_of


class EarlyRefusal:
    """ASGI middleware: 429 in the OpenAI form to what is posted to `paths`. refusal: None while some unit may take a request."""

    def __init__(self, app: ASGIApp, paths: Collection[str], refusal: Callable[[], Overloaded | None]) -> None:
        self._app = app
        self._paths, self._refusal = paths, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and scope["path"].removeprefix(scope.get("root_path", "")) in self._paths
        ):
            refused = self._refusal()
            if refused is not None:
                status, body, headers = failure(refused, request_id_of(Request(scope)))
                return await JSONResponse(body, status, headers=headers)(scope, receive, send)
        await self._app(scope, receive, send)
