"""Chat messages to one prompt text, by the checkpoint's Jinja template, in a sandbox.

Variables and filters are those that transformers gives its templates. It must not know HTTP.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext

from dflash2_ray.errors import CheckpointError, ConfigError, InvalidRequest
from dflash2_ray.text.json_file import read_json_object
from dflash2_ray.text.short import cut, short
from dflash2_ray.text.template_sandbox import LimitedSandbox

ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTemplate:
    """A compiled template with the special tokens it may name; None when the checkpoint has none."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._sandbox = _sandbox()
        self._template = None if source is None else self._sandbox.from_string(source)
        self._shows_tools = source is not None and "tools" in source

    @classmethod
    def from_folder(cls, folder: Path, override: str | None = None) -> "ChatTemplate":
        """Read `chat_template.jinja` or the tokenizer's own; `override` is a path that replaces both.

        Raises ConfigError for a bad override, CheckpointError for a broken file.
        """
        folder = Path(folder)
        settings = read_json_object(folder / "tokenizer_config.json")
        special = {name: _token_text(value) for name, value in settings.items() if name.endswith("_token") and value}
        try:
            return cls(_source(folder, settings, override), special)
        except jinja2.TemplateSyntaxError as error:
            kind = ConfigError if override else CheckpointError
            raise kind(f"chat_template: line {error.lineno}: {error.message}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The prompt that asks for the assistant's next turn, with the functions that it may call. Raises InvalidRequest, naming
        the message and the field."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; send a plain prompt, or start the service with chat_template=PATH",
                param="messages",
            )
        turns = check_messages(messages)
        if tools and not self._shows_tools:
            raise InvalidRequest(
                "this model's chat template does not show tools; start the service with chat_template=PATH",
                param="tools",
            )
        try:
            variables = {"messages": turns, "add_generation_prompt": True, "tools": tools, "documents": None}
            return self._sandbox.run(self._template, {**variables, **self._special_tokens})
        except Exception as error:  # a template is a program: whatever it raises, these messages made it do so
            raise InvalidRequest(
                f"messages: the chat template refuses them: {cut(str(error), 300)}", param="messages"
            ) from None


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with string contents (text parts joined). Raises InvalidRequest, naming the message and the field."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest(f"messages must be a non-empty list, got {short(messages)}", param="messages")
    turns = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{index}] must be an object, got {short(message)}", param="messages")
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequest(
                f"messages[{index}].role must be one of {', '.join(ROLES)}, got {short(role)}", param="messages"
            )
        known = {"role", "content", "name", *_OWN_KEYS.get(role, ())}
        unknown = sorted(str(key) for key in set(message) - known)
        if unknown:
            raise InvalidRequest(
                f"messages[{index}].{unknown[0][:80]} is not offered", param=f"messages[{index}].{unknown[0][:80]}"
            )
        turn = {**message}
        if message.get("tool_calls") is not None:
            turn["tool_calls"] = [
                _call(f"messages[{index}].tool_calls[{at}]", call)
                for at, call in enumerate(_calls(index, message["tool_calls"]))
            ]
        silent = bool(turn.get("tool_calls")) and message.get("content") is None  # an assistant that only called
        turns.append({**turn, "content": "" if silent else _content(index, message.get("content"))})
    return turns


_OWN_KEYS = {"assistant": ("tool_calls", "refusal"), "tool": ("tool_call_id",)}


def _calls(index: int, calls: Any) -> list[Any]:
    if not isinstance(calls, list) or not calls:
        raise InvalidRequest(
            f"messages[{index}].tool_calls must be a list of calls, none empty, got {short(calls)}",
            param=f"messages[{index}].tool_calls",
        )
    return calls


def _call(path: str, call: Any) -> dict[str, Any]:
    """One call as templates expect it: its arguments as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise InvalidRequest(f"{path}.function must hold a name and arguments, got {short(call)}", param=path)
    arguments = function.get("arguments") or "{}"
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, Mapping):
        raise InvalidRequest(
            f"{path}.function.arguments must be a JSON object in a string, got {short(arguments)}", param=path
        )
    return {**call, "function": {"name": name, "arguments": read}}


def _content(index: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(
            f"messages[{index}].content must be a string or a list of text parts, got {short(content)}",
            param="messages",
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise InvalidRequest(
                f"messages[{index}].content: only parts of type 'text' are offered, got {kind if isinstance(kind, str) else short(part)}",
                param="messages",
            )
        texts.append(text)
    return "".join(texts)


def _source(folder: Path, settings: Mapping[str, Any], override: str | None) -> str | None:
    if override is not None:
        try:
            return Path(override).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: cannot read {override!r}: {error}") from None
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return own.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{own.name}: cannot be read: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        return next((str(one["template"]) for one in template if one.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _sandbox() -> LimitedSandbox:
    environment = LimitedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None, **options: json.dumps(
        value, ensure_ascii=options.get("ensure_ascii", False), indent=indent
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, Mapping) else str(value)
