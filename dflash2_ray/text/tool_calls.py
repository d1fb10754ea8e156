"""Tool calls out of generated text, while it arrives: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`.

What comes out does not depend on how the text is cut into pieces. Text that may still become a call is held back; what turns
out to be none is content, unchanged. A call is told when it is complete. It must not know tokens.

A call is malformed from the first character on that cannot belong to one: something other than an object behind the tag, `<`
outside a string or a control character inside one, an object that is no JSON or has no name, something other than the closing tag
behind it. Reading goes on at that character, so a call that begins there is found.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_SPACE = " \t\r\n"
_OUTSIDE = re.compile(r'["{}<]')
_INSIDE = re.compile(r'["\\\x00-\x1f]')
_BLANK = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class ContentDelta:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of call `index`: first one with id and name and empty arguments, then one with the arguments' JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        """One entry of `delta.tool_calls`."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


Event = ContentDelta | ToolCallDelta


class ToolCallParser:
    """One per answer. request_id: what call ids are made from. max_calls: later calls are content; None: no limit.

    White space that stands alone between two calls, or between a call and either end of the text, is part of the format and dropped.
    """

    def __init__(self, request_id: str, max_calls: int | None = None) -> None:
        self._request_id = request_id
        self._max_calls = max_calls
        self._calls = 0
        self._text = ""
        self._told = 0  # everything before this position has been told or dropped; a call being read begins here
        self._scan: _Scan | None = None
        self._blank: str | None = (
            ""  # white space since the beginning or the last call; None once there was more than that
        )

    def push(self, text: str) -> list[Event]:
        """What `text` completes."""
        self._text += text
        events: list[Event] = []
        while self._step(events):
            pass
        if self._scan is None:
            self._text, self._told = self._text[self._told :], 0
        return _joined(events)

    def finish(self) -> list[Event]:
        """What was held back, at the end of the text: it became no call."""
        events: list[Event] = []
        self._content(self._text[self._told :], events)
        if self._blank and not self._calls:
            events.append(ContentDelta(self._blank))
        self._text, self._told, self._scan, self._blank = "", 0, None, ""
        return _joined(events)

    def _step(self, events: list[Event]) -> bool:
        """Take one stretch off the text. False when more text is needed first."""
        if self._scan is None:
            return self._find_call(events)
        found = self._scan.run(self._text)
        if found is None:
            return False
        end, body = found
        call = read_call(self._text[body]) if body is not None else None
        if call is None:
            self._content(self._text[self._told : end], events)
        else:
            name, arguments = call
            events.append(ToolCallDelta(self._calls, call_id(self._request_id, self._calls), name, ""))
            events.append(ToolCallDelta(self._calls, None, None, arguments))
            self._calls += 1
            self._blank = ""
        self._told, self._scan = end, None
        return True

    def _find_call(self, events: list[Event]) -> bool:
        text, start, kept = self._text, -1, 0
        if self._max_calls is None or self._calls < self._max_calls:
            start = text.find(OPEN, self._told)
            kept = next((size for size in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:size], self._told)), 0)
        end = start if start >= 0 else len(text) - kept
        self._content(text[self._told : end], events)
        self._told = end
        if start >= 0:
            self._scan = _Scan(end + len(OPEN))
        return start >= 0

    def _content(self, text: str, events: list[Event]) -> None:
        if self._blank is not None:
            text = self._blank + text
            self._blank = None if text.strip(_SPACE) else text
        if self._blank is None and text:
            events.append(ContentDelta(text))


class _Scan:
    """How far a call has been read, from `at`, behind its tag; every character is looked at once."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._body: tuple[int, int] | None = None
        self._start = 0
        self._depth = 0
        self._in_string = False

    def run(self, text: str) -> tuple[int, slice | None] | None:
        """(end of the stretch, where its object lies or None when malformed); None: more text is needed."""
        if self._start == 0:
            self._at = _after_blank(text, self._at)
            if self._at == len(text):
                return None
            if text[self._at] != "{":
                return self._at, None
            self._start = self._at
        if self._body is None:
            failed = self._object(text)
            if failed is not None:
                return failed, None
            if self._body is None:
                return None
        self._at = _after_blank(text, self._at)
        rest = text[self._at : self._at + len(CLOSE)]
        if rest == CLOSE:
            return self._at + len(CLOSE), slice(*self._body)
        return None if CLOSE.startswith(rest) else (self._at, None)

    def _object(self, text: str) -> int | None:
        """Read on to the object's last brace, if it is there. A position: what stands there cannot belong to a call."""
        while found := (_INSIDE if self._in_string else _OUTSIDE).search(text, self._at):
            sign, at = found.group(), found.start()
            if self._in_string:
                if sign == "\\":
                    if at + 1 == len(text):
                        self._at = at
                        return None
                    at += 1
                elif sign != '"':
                    return at
                else:
                    self._in_string = False
            elif sign == "<":
                return at
            elif sign == '"':
                self._in_string = True
            else:
                self._depth += 1 if sign == "{" else -1
            self._at = at + 1
            if self._depth == 0:
                self._body = (self._start, self._at)
                return None
        self._at = len(text)
        return None


def read_calls(
    pieces: Iterable[str], request_id: str, max_calls: int | None
) -> tuple[str | None, list[dict[str, Any]]]:
    """(content, tool_calls) of a whole text, however it is cut; arguments as of `ToolCallParser`."""
    parser = ToolCallParser(request_id, max_calls)
    events = [event for piece in pieces for event in parser.push(piece)]
    return collect([*events, *parser.finish()])


def read_call(text: str) -> tuple[str, str] | None:
    """(name, arguments as the model wrote them) of the JSON object `text`; None when it is no call.

    Arguments are an object's JSON text, or the content of a string that holds one; an object without them has the arguments {}.
    """
    try:
        parts = _members(text)
        name = json.loads(parts.get("name", "null"))
        arguments = parts.get("arguments", "{}")
        if arguments.startswith('"'):
            arguments = json.loads(arguments)
            _members(arguments.strip(_SPACE))
        (str(name) + arguments).encode()  # half a surrogate pair cannot be sent
    except (ValueError, RecursionError):
        return None
    return (name, arguments) if isinstance(name, str) and name and arguments.lstrip(_SPACE).startswith("{") else None


def call_id(request_id: str, index: int) -> str:
    """The id of call `index` of a request: always the same, so that a stream that goes on elsewhere agrees with itself."""
    return "call_" + hashlib.blake2b(f"{request_id}\0{index}".encode(), digest_size=12).hexdigest()


def collect(events: Iterable[Event]) -> tuple[str | None, list[dict[str, Any]]]:
    """(content, tool_calls) of an OpenAI message; content is None when there is no text."""
    content: list[str] = []
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, ContentDelta):
            content.append(event.text)
        elif event.name is not None:
            function = {"name": event.name, "arguments": event.arguments}
            calls.append({"id": event.id, "type": "function", "function": function})
        else:
            calls[event.index]["function"]["arguments"] += event.arguments
    return "".join(content) or None, calls


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse_constant)


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object as the texts of their values; of a key that comes twice the last. Raises ValueError."""
    members: dict[str, str] = {}
    if not text.startswith("{"):
        raise ValueError("no object")
    at = _after_blank(text, 1)
    while not text.startswith("}", at) or members:
        if not text.startswith('"', at):
            raise ValueError("no key")
        key, at = _DECODER.raw_decode(text, at)
        at = _after_blank(text, at)
        if not text.startswith(":", at):
            raise ValueError("no colon")
        start = _after_blank(text, at + 1)
        try:
            _, end = _DECODER.raw_decode(text, start)
        except StopIteration as error:
            raise ValueError("no value") from error
        members[key] = text[start:end]
        at = _after_blank(text, end)
        if text.startswith("}", at):
            break
        if not text.startswith(",", at):
            raise ValueError("no comma")
        at = _after_blank(text, at + 1)
    if at + 1 != len(text):
        raise ValueError("more text")
    return members


def _after_blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _joined(events: list[Event]) -> list[Event]:
    """Neighbouring contents as one."""
    joined: list[Event] = []
    for is_content, group in itertools.groupby(events, lambda event: isinstance(event, ContentDelta)):
        if is_content:
            joined.append(ContentDelta("".join(event.text for event in group if isinstance(event, ContentDelta))))
        else:
            joined.extend(group)
    return joined
