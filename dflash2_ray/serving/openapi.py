"""What `/openapi.json` says of a route: its body, and every status that can come, with the one shape of errors."""

from typing import Any

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_STATUSES = {
    400: "A field has a bad value",
    401: "Missing or wrong API key",
    404: "Unknown model or route",
    405: "Unknown method",
    413: "Body too large",
    429: "Too many requests",
    500: "Internal error",
    503: "Not ready, or lost",
    504: "Deadline passed",
}


def responses() -> dict[int | str, dict[str, Any]]:
    """Every error status, in the OpenAI shape."""
    return {
        status: {"description": text, "content": {"application/json": {"schema": ERROR_SCHEMA}}}
        for status, text in _STATUSES.items()
    }


def body_of(schema: dict[str, Any]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes a JSON body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
