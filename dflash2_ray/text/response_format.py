"""OpenAI's `response_format` to a grammar. What is malformed or could not be enforced is refused, with the field's path.

The result is a text that llguidance reads (`sampling/grammar.py` takes it); nothing here knows a vocabulary.
"""

import functools
import re
from typing import Any

import llguidance

from dflash2_ray.errors import InvalidRequest
from dflash2_ray.text.json_schema import checked_schema, refuse_invalid
from dflash2_ray.text.short import short

FORMS = ("text", "json_object", "json_schema", "regex")
MAX_REGEX_BYTES = 16 * 1024
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def response_grammar(response_format: Any) -> str | None:
    """The grammar of the text that is asked for; None where any text will do. Raises InvalidRequest.

    Forms: {"type": "text"}; {"type": "json_object"}; {"type": "json_schema", "json_schema": {"name", "schema", "strict"?,
    "description"?}}; {"type": "regex", "regex": "..."} ("pattern" is taken too). A schema is always enforced, also with `strict` false.
    """
    if response_format is None:
        return None
    form = _object(response_format, "response_format")
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in FORMS:
        raise _bad("response_format.type", f"must be one of {', '.join(FORMS)}, got {short(kind)}")
    if kind == "json_schema":
        _only(form, "response_format", {"type", "json_schema"})
        return _json_schema(_object(form.get("json_schema"), "response_format.json_schema"))
    if kind == "regex":
        _only(form, "response_format", {"type", "regex", "pattern"})
        return _regex(form)
    _only(form, "response_format", {"type"})
    return None if kind == "text" else _any_object()


@functools.cache
def _any_object() -> str:
    """The grammar of any JSON object, the same for every request."""
    return llguidance.LLMatcher.grammar_from_json_schema(checked_schema({"type": "object"}, "response_format"))


def _json_schema(form: dict[str, Any]) -> str:
    path = "response_format.json_schema"
    _only(form, path, {"name", "description", "schema", "strict"})
    name, description, strict = form.get("name"), form.get("description"), form.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _bad(f"{path}.name", f"must be 1 to 64 letters, digits, '_' or '-', got {short(name)}")
    if description is not None and not isinstance(description, str):
        raise _bad(f"{path}.description", f"must be a string, got {short(description)}")
    if strict is not None and not isinstance(strict, bool):
        raise _bad(f"{path}.strict", f"must be true or false, got {short(strict)}")
    return llguidance.LLMatcher.grammar_from_json_schema(checked_schema(form.get("schema"), f"{path}.schema"))


def _regex(form: dict[str, Any]) -> str:
    given = [key for key in ("regex", "pattern") if key in form]
    if len(given) == 2:
        raise _bad("response_format.pattern", "says the same as response_format.regex; give one of them")
    path = f"response_format.{given[0] if given else 'regex'}"
    regex = form.get(given[0]) if given else None
    if not isinstance(regex, str):
        raise _bad(path, f"must be a regular expression (a string), got {short(regex)}")
    try:
        size = len(regex.encode())
    except UnicodeEncodeError:
        raise _bad(path, "holds half a surrogate pair") from None
    if size > MAX_REGEX_BYTES:
        raise _bad(path, f"has {size} bytes, at most {MAX_REGEX_BYTES} are taken")
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise _bad(path, f"ends in a backslash with nothing behind it, got {short(regex)}")
    grammar = llguidance.LLMatcher.grammar_from_regex(regex)
    refuse_invalid(grammar, path)
    return grammar


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(path, f"must be an object, got {short(value)}")
    return value


def _only(form: dict[str, Any], path: str, known: set[str]) -> None:
    unknown = sorted(str(key) for key in set(form) - known)
    if unknown:
        raise _bad(f"{path}.{unknown[0][:80]}", "is not offered")


def _bad(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{path} {what}", param=path)
