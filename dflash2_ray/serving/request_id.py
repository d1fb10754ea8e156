"""The id that a request carries through logs, headers and engine."""

import uuid

from fastapi import Request


def request_id_of(request: Request) -> str:
    """The caller's x-request-id, or a new one."""
    given = request.headers.get("x-request-id", "")
    return given if 0 < len(given) <= 128 and given.isprintable() else uuid.uuid4().hex
