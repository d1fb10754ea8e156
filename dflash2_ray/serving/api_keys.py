"""Who may ask: API keys from a file and the environment, kept as digests, compared in constant time."""

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash2_ray.errors import ConfigError
from dflash2_ray.serving.openai_api import plain_error

KEYS_VARIABLE = "DFLASH2_API_KEYS"
OPEN_PATHS = ("/health", "/ready")


def read_key_digests(path: str | None, environment: Mapping[str, str] = os.environ) -> tuple[bytes, ...]:
    """SHA-256 digests of the keys in the file (one per line; a line that begins with # is a comment) and in the variable
    DFLASH2_API_KEYS (separated by commas); none where neither is given. Raises ConfigError for a file that cannot be read or holds
    no key."""
    keys = [key.strip() for key in environment.get(KEYS_VARIABLE, "").split(",")]
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_keys_file: {path!r} cannot be read: {type(error).__name__}") from None
        own = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not own:
            raise ConfigError(f"api_keys_file: expected one key per line in {path!r}, got none")
        keys += own
    return tuple(dict.fromkeys(hashlib.sha256(key.encode()).digest() for key in keys if key))


class ApiKeys:
    """ASGI middleware: 401 in the OpenAI form unless the bearer token is one of the keys. Health checks and CORS preflights pass."""

    def __init__(self, app: ASGIApp, digests: Iterable[bytes]) -> None:
        self._app = app
        self._digests = tuple(digests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) not in OPEN_PATHS and scope["method"] != "OPTIONS":
            header = dict(scope["headers"]).get(b"authorization", b"")
            if not self._knows(header):
                message = "Incorrect API key provided." if header else "You didn't provide an API key: send it as a bearer token in the Authorization header."
                body = plain_error(message, "invalid_request_error", None, "invalid_api_key")
                return await JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
        await self._app(scope, receive, send)

    def _knows(self, header: bytes) -> bool:
        kind, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, whichever fits
        return kind.lower() == b"bearer" and any(matches)
