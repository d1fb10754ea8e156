"""The sets of options that are proven, with values taken from what the model says to the user's own prompts.

An option that shapes the text takes its tokens and words from plain answers, so that it has something to change there.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash2_ray.verification.answer import Answer, Choice

NONE = "no options"
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
TEXTS = {"greedy": GREEDY, "seeded": SEEDED}
NOT_PROVEN: dict[str, str] = {}  # exact options that no set holds, and why


@dataclass(frozen=True)
class OptionSet:
    """options: HTTP fields, over `max_tokens` and those of `TEXTS`; null takes one away. route: the one that has these options, None for
    both. beside: the set that lacks what this one is about. form: whether a finished text is as asked."""

    name: str
    options: dict[str, Any]
    route: str | None = None
    beside: str | None = NONE
    form: Callable[[Choice], bool] | None = None

    @property
    def texts(self) -> dict[str, dict[str, Any]]:
        """Options of each run, without `max_tokens`."""
        return {
            name: {**law, **self.options}
            for name, law in TEXTS.items()
            if name == "seeded" or "temperature" not in self.options
        }


@dataclass(frozen=True)
class Seen:
    """What plain answers hold. token_ids: all of them, the most frequent first; late_ids, late_words: from the last third of an
    answer, where a stop leaves something in front of it."""

    token_ids: tuple[int, ...]
    words: tuple[str, ...]
    late_ids: tuple[int, ...]
    late_words: tuple[str, ...]

    @classmethod
    def of(cls, answers: Sequence[Answer], eos_token_ids: Sequence[int]) -> "Seen":
        """Answers without any token or word give token 0 and the letter e."""
        choices = [answer.choices[0] for answer in answers if answer.choices]
        texts = [[token for token in choice.token_ids if token not in eos_token_ids] for choice in choices]
        words = [re.findall(r"\w+", choice.text) for choice in choices]
        return cls(
            token_ids=_by_frequency(token for text in texts for token in text) or (0,),
            words=_by_frequency(word for text in words for word in text) or ("e",),
            late_ids=_by_frequency(text[len(text) * 2 // 3] for text in texts if text)[:4] or (0,),
            late_words=_by_frequency(text[len(text) * 2 // 3] for text in words if text)[:4] or ("e",),
        )


def option_sets(seen: Seen, max_tokens: int) -> tuple[OptionSet, ...]:
    """All of them; those that others stand beside come first."""
    ids, stops = seen.token_ids, list(seen.late_words)
    less, often = max(1, max_tokens // 2), str(ids[0])
    endless = {"ignore_eos": True}
    tools, call = {"tools": TOOLS}, {"type": "function", "function": {"name": "get_time"}}
    return (
        OptionSet(NONE, {}, beside=None),
        OptionSet("temperature", {"temperature": 0.6}),
        OptionSet("ignore_eos", endless),
        OptionSet("top_p", {**endless, "top_p": 0.6}, beside="ignore_eos"),
        OptionSet("top_k", {**endless, "top_k": 2}, beside="ignore_eos"),
        OptionSet("min_p", {**endless, "min_p": 0.3}, beside="ignore_eos"),
        OptionSet("seed", {"seed": 77}),
        OptionSet("repetition_penalty", {"repetition_penalty": 1.3}),
        OptionSet("presence_penalty", {"presence_penalty": 1.0}),
        OptionSet("frequency_penalty", {"frequency_penalty": 0.8}),
        OptionSet("logit_bias", {"logit_bias": {often: -100, **{str(token): 3 for token in ids[1:3]}}}),
        OptionSet("allowed_token_ids", {"allowed_token_ids": sorted(ids[len(ids) // 16 :])}),
        OptionSet("bad_words", {"bad_words": list(seen.words[:2])}),
        OptionSet("max_tokens", {"max_tokens": less}),
        OptionSet("max_completion_tokens", {"max_tokens": None, "max_completion_tokens": less}, "chat"),
        OptionSet("skip_special_tokens", {**endless, "skip_special_tokens": False}, beside="ignore_eos"),
        OptionSet("stop", {"stop": stops}),
        OptionSet("include_stop_str_in_output", {"stop": stops, "include_stop_str_in_output": True}, beside="stop"),
        OptionSet("min_tokens", {"stop": stops, "min_tokens": less}, beside="stop"),
        OptionSet("stop_token_ids", {"stop_token_ids": list(seen.late_ids)}),
        OptionSet("n", {"n": 2}),
        OptionSet("logprobs", {**endless, "logprobs": 2}, "completions", beside="ignore_eos"),
        OptionSet("top_logprobs", {"logprobs": True, "top_logprobs": 3}, "chat"),
        OptionSet("echo", {**endless, "echo": True}, "completions", beside="ignore_eos"),
        OptionSet("echo with prompt logprobs", {**endless, "echo": True, "logprobs": 1}, "completions", beside="echo"),
        OptionSet("response_format json_object", {"response_format": {"type": "json_object"}}, form=_is_object),
        OptionSet("response_format json_schema", {"response_format": _SCHEMA_FORMAT}, form=_is_animal),
        OptionSet("response_format regex", {"response_format": {"type": "regex", "regex": _REGEX}}, form=_is_regex),
        OptionSet("tools auto", {**tools, "tool_choice": "auto"}, "chat"),
        OptionSet(
            "tools required",
            {**tools, "tool_choice": "required", "parallel_tool_calls": False},
            "chat",
            "tools auto",
            _is_call,
        ),
        OptionSet("tools named", {**tools, "tool_choice": call}, "chat", "tools auto", _is_call),
        OptionSet(
            "many at once",
            {
                "top_p": 0.95,
                "repetition_penalty": 1.1,
                "presence_penalty": 0.3,
                "logit_bias": {often: -2},
                "bad_words": list(seen.words[:1]),
                "min_tokens": less,
                "stop": stops,
                "n": 2,
            },
        ),
    )


def _by_frequency(values: Any) -> tuple[Any, ...]:
    return tuple(value for value, _ in sorted(Counter(values).items(), key=lambda item: (-item[1], item[0])))


# ---- forms ------------------------------------------------------------------------------------------------------------

_REGEX = r"(yes|no), [a-z]{3,9} [0-9]{2}"
_KINDS = ["pony", "horse"]
_SCHEMA_FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "animal",
        "schema": {
            "type": "object",
            "properties": {"kind": {"enum": _KINDS}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["kind", "age"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"enum": ["UTC", "CET"]}},
                "required": ["zone"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
]


def _is_object(choice: Choice) -> bool:
    return isinstance(_json(choice.text), dict)


def _is_animal(choice: Choice) -> bool:
    found = _json(choice.text)
    if not isinstance(found, dict) or set(found) != {"kind", "age"}:
        return False
    return found["kind"] in _KINDS and isinstance(found["age"], int) and 0 <= found["age"] <= 99


def _is_regex(choice: Choice) -> bool:
    return re.fullmatch(_REGEX, choice.text) is not None


def _is_call(choice: Choice) -> bool:
    keys = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}  # type: ignore[index]
    return bool(choice.tool_calls) and all(
        sorted(_json(text) or ()) == keys.get(name) for name, text in choice.tool_calls
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
