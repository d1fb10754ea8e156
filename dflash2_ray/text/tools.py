"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat request, checked once, every problem named by its path.

It must not know the text of a call (`tool_grammar.py`, `tool_calls.py`) or the chat template.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from dflash2_ray.errors import InvalidRequest
from dflash2_ray.text.short import short

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
CHOICES = ("none", "auto", "required")
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """What a request allows. tools: as sent, without nulls; choice: none, auto, required or named; name: set when named.

    parallel: more than one call per turn may be made.
    """

    tools: tuple[dict[str, Any], ...]
    choice: str
    name: str | None
    parallel: bool

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """The tools that the chat template is given; None when none may be called."""
        return None if self.choice == "none" else [dict(tool) for tool in self.tools]

    @property
    def max_calls(self) -> int | None:
        """How many calls the answer may hold; None: any number."""
        if self.choice == "none":
            return 0
        return None if self.parallel and self.choice != "named" else 1

    @property
    def must_call(self) -> bool:
        return self.choice in ("required", "named")


def parse_tools(tools: Any, tool_choice: Any = None, parallel_tool_calls: Any = None) -> ToolUse | None:
    """The three fields of a request; None without `tools`. Raises InvalidRequest.

    Parameter schemas are only looked at when a call is required (`tool_grammar.py`): otherwise they are text for the model.
    """
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        _refuse("parallel_tool_calls", f"must be true or false, got {short(parallel_tool_calls)}")
    if tools is None:
        if tool_choice not in (None, "none", "auto"):
            _refuse("tool_choice", "is only allowed when tools are given")
        if parallel_tool_calls is not None:
            _refuse("parallel_tool_calls", "is only allowed when tools are given")
        return None
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        got = f"a list of {len(tools)}" if isinstance(tools, list) else short(tools)
        _refuse("tools", f"must be a list of 1 to {MAX_TOOLS} functions, got {got}")
    checked = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in checked]
    for index, name in enumerate(names):
        if name in names[:index]:
            _refuse(f"tools[{index}].function.name", f"stands for two functions, got {short(name)} twice")
    _check_size(checked)
    choice, name = _choice(tool_choice, names)
    return ToolUse(checked, choice, name, parallel_tool_calls is not False)


def _tool(tool: Any, path: str) -> dict[str, Any]:
    form = _object(tool, path, {"type", "function"})
    if form.get("type") != "function":
        _refuse(f"{path}.type", f"must be 'function', got {short(form.get('type'))}")
    path = f"{path}.function"
    function = _object(form.get("function"), path, {"name", "description", "parameters", "strict"})
    name, description, strict = function.get("name"), function.get("description"), function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        _refuse(f"{path}.name", f"must be 1 to 64 letters, digits, '_' or '-', got {short(name)}")
    if description is not None and not isinstance(description, str):
        _refuse(f"{path}.description", f"must be a string, got {short(description)}")
    if strict is not None and not isinstance(strict, bool):
        _refuse(f"{path}.strict", f"must be true or false, got {short(strict)}")
    parameters = function.get("parameters")
    if parameters is not None:
        if not isinstance(parameters, dict):
            _refuse(f"{path}.parameters", f"must be a JSON schema (an object), got {short(parameters)}")
        if parameters and parameters.get("type") != "object":
            _refuse(f"{path}.parameters.type", f"must be 'object', got {short(parameters.get('type'))}")
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def parameters_of(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: without `parameters` no argument is taken; an empty schema says any object."""
    parameters: dict[str, Any] = tool["function"].get("parameters", NO_ARGUMENTS)
    return parameters or {"type": "object"}


def _check_size(tools: tuple[dict[str, Any], ...]) -> None:
    try:
        size = len(json.dumps(tools, allow_nan=False, ensure_ascii=False).encode())
    except (ValueError, TypeError, RecursionError) as error:
        _refuse("tools", f"are not JSON: {str(error)[:80]}")
    if size > MAX_TOOLS_BYTES:
        _refuse("tools", f"have {size} bytes, at most {MAX_TOOLS_BYTES} are taken")


def _choice(choice: Any, names: list[str]) -> tuple[str, str | None]:
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in CHOICES:
            _refuse("tool_choice", f"must be one of {', '.join(CHOICES)} or name a function, got {short(choice)}")
        return choice, None
    form = _object(choice, "tool_choice", {"type", "function"})
    if form.get("type") != "function":
        _refuse("tool_choice.type", f"must be 'function', got {short(form.get('type'))}")
    name = _object(form.get("function"), "tool_choice.function", {"name"}).get("name")
    if name not in names:
        _refuse("tool_choice.function.name", f"must be one of the tools, got {short(name)}")
    return "named", str(name)


def _object(value: Any, path: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(path, f"must be an object, got {short(value)}")
    unknown = sorted(str(key) for key in set(value) - known)
    if unknown:
        _refuse(f"{path}.{unknown[0][:80]}", "is not offered")
    return dict(value)


def _refuse(path: str, what: str) -> NoReturn:
    raise InvalidRequest(f"{path} {what}", param=path)
