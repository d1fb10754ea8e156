"""Values of a request as error messages show them: never long, whatever was sent."""

import reprlib
from typing import Any

LIMIT = 80

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = LIMIT
_REPR.maxlevel, _REPR.maxlist, _REPR.maxtuple, _REPR.maxdict = 2, 3, 3, 3


def short(value: Any) -> str:
    """`repr(value)`, at most 80 characters, without building a long one first."""
    return cut(_REPR.repr(value))


def cut(text: str, limit: int = LIMIT) -> str:
    """`text`, at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
