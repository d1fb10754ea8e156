"""Who may ask: a middleware that compares a request's bearer token with the keys' digests, in constant time."""

import hashlib
import hmac

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash2_ray.serving.key_digests import CurrentKeys
from dflash2_ray.serving.openai_api import plain_error

OPEN_PATHS = ("/health", "/ready")


class ApiKeys:
    """ASGI middleware: 401 in the OpenAI form unless the bearer token is one of the keys. Health checks and CORS preflights pass."""

    def __init__(self, app: ASGIApp, keys: CurrentKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["path"].removeprefix(scope.get("root_path", "")) not in OPEN_PATHS
            and scope["method"] != "OPTIONS"
        ):
            header = dict(scope["headers"]).get(b"authorization", b"")
            if not self._knows(header):
                message = (
                    "Incorrect API key provided."
                    if header
                    else "You didn't provide an API key: send it as a bearer token in the Authorization header."
                )
                body = plain_error(message, "invalid_request_error", None, "invalid_api_key")
                return await JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
        await self._app(scope, receive, send)

    def _knows(self, header: bytes) -> bool:
        kind, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys.digests()]  # all of them, whichever fits
        return kind.lower() == b"bearer" and any(matches)
