"""Which JSON schemas may constrain an output. What would not be enforced exactly is refused, by name and path.

llguidance compiles schemas, reports most of what it cannot do, and skips keywords that it does not know; so every keyword is
looked at here first. It must not know where the schema came from.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn

import llguidance

from dflash2_ray.errors import InvalidRequest
from dflash2_ray.text.short import cut, short

MAX_SCHEMA_BYTES = 256 * 1024
MAX_DEPTH = 64

_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
_LISTED_SCHEMAS = {"anyOf", "allOf", "oneOf", "prefixItems"}
_ONE_SCHEMA = {"items", "additionalItems", "additionalProperties"}
_VALUES = {
    *("type", "const", "enum", "required", "$ref", "pattern", "format", "minLength", "maxLength", "multipleOf"),
    *(
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
    ),
}
_NOTES = {"$schema", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_AT_THE_ROOT = {"$id"}
_KEYWORDS = _NAMED_SCHEMAS | _LISTED_SCHEMAS | _ONE_SCHEMA | _VALUES | _NOTES


# How the values of a schema are written. White space without end would let a model that likes it fill its budget with nothing else.
COMPACT_OR_INDENTED: dict[str, Any] = {"whitespace_pattern": r"[ ]|\n[ \t]{0,40}"}
AS_TEMPLATES_WRITE: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def checked_schema(schema: Any, path: str, writing: dict[str, Any] = COMPACT_OR_INDENTED) -> str:
    """`schema` serialised, keys in their order, with llguidance's options for `writing`. path: its field in the request.

    Raises InvalidRequest with the path of what is malformed or cannot be enforced, for more than 256 KiB of JSON, and for
    schemas nested more than 64 deep.
    """
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path} must be a JSON schema (an object), got {short(schema)}", param=path)
    try:
        text = json.dumps(schema, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
        size = len(text.encode())
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {cut(str(error))}", param=path) from None
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{path} has {size} bytes, at most {MAX_SCHEMA_BYTES} are taken", param=path)
    _check(schema, path, 1, root=True)
    text = json.dumps({**schema, "x-guidance": writing}, separators=(",", ":"), ensure_ascii=False)
    refuse_invalid(llguidance.LLMatcher.grammar_from_json_schema(text), path)
    return text


def refuse_invalid(grammar: str, path: str) -> None:
    """Raise InvalidRequest with llguidance's own words, as those of the field `path`, unless it takes `grammar` as it is."""
    failed, told = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    if failed or told:
        raise InvalidRequest(f"{path} cannot be enforced: {cut(' '.join(' '.join(told).split()), 300)}", param=path)


def _check(schema: Any, path: str, depth: int, root: bool = False) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        _refuse(path, f"must be a JSON schema (an object or a boolean), got {short(schema)}")
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{cut(path, 200)} is nested more than {MAX_DEPTH} schemas deep", param=cut(path, 200))
    for key, value in schema.items():
        if key not in _KEYWORDS and not (root and key in _AT_THE_ROOT):
            _refuse(path, f"has the keyword {short(key)}, which cannot be enforced")
        here = f"{path}.{key}"
        if key in _NAMED_SCHEMAS:
            for name, one in _expect(value, dict, here, "an object of schemas").items():
                _check(one, f"{here}.{cut(name)}", depth + 1)
        elif key in _LISTED_SCHEMAS or (key == "items" and isinstance(value, list)):
            for index, one in enumerate(_expect(value, list, here, "a list of schemas")):
                _check(one, f"{here}[{index}]", depth + 1)
        elif key in _ONE_SCHEMA:
            _check(value, here, depth + 1)
        elif key in _ENFORCED_ON:
            _ENFORCED_ON[key](schema, here)


def _check_format(schema: dict[str, Any], path: str) -> None:
    kinds = schema.get("type", "string")
    if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        _refuse(path, f"is enforced on strings only, got it beside type {short(kinds)}")


def _check_ref(schema: dict[str, Any], path: str) -> None:
    if not isinstance(schema["$ref"], str) or not schema["$ref"].startswith("#"):
        _refuse(path, f"must point into the same schema ('#/...'), got {short(schema['$ref'])}")


_ENFORCED_ON: dict[str, Callable[[dict[str, Any], str], None]] = {"format": _check_format, "$ref": _check_ref}


def _expect(value: Any, kind: type, path: str, what: str) -> Any:
    if not isinstance(value, kind):
        _refuse(path, f"must be {what}, got {short(value)}")
    return value


def _refuse(path: str, what: str) -> NoReturn:
    raise InvalidRequest(f"{cut(path, 200)} {what}", param=cut(path, 200))
