"""The JSON body of a request."""

import json
from typing import Any

from fastapi import Request

from dflash2_ray.errors import InvalidRequest


async def json_body(request: Request) -> Any:
    """The parsed body. Raises InvalidRequest, also for text that cannot be sent back: half a surrogate pair."""
    try:
        text = (await request.body()).decode()
        body = json.loads(text, parse_constant=_no_constant)
        if "\\ud" in text.lower():
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the body holds half a surrogate pair (\\ud800 to \\udfff), which is no text") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start}: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    return body


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
