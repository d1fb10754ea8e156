"""The table of request fields: what is exact under speculation, what changes nothing, and what is refused by name.

The one source of what the API accepts, of the schema in `/openapi.json`, and of the table in README.md.
"""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["exact", "request", "no effect", "refused"]
ROUTES = ("completions", "chat")


@dataclass(frozen=True)
class Option:
    """One field. kind: `exact`: changes the text, exactly so under speculation; `request`: how the answer is given; `no effect`:
    accepted, changes nothing; `refused`: a 400, except for the `neutral` values, which ask for nothing.

    schema: JSON schema of the value. proof: the test of an exact or refused option. sampling: handed to `SamplingParams`.
    """

    name: str
    kind: Kind
    schema: dict[str, Any]
    proof: str = ""
    routes: tuple[str, ...] = ROUTES
    neutral: tuple[Any, ...] = ()
    sampling: bool = False


_E2E = "tests/e2e/test_options.py"
_STRUCTURED = "tests/serve/test_structured.py"
_LAW = "tests/e2e/test_sampling_law.py"
_SHAPED = "tests/e2e/test_option_law.py"
_HTTP = "tests/serve/test_options.py"
_BAD = "tests/serve/test_http.py"
_NUMBER, _INTEGER, _FLAG = {"type": "number"}, {"type": "integer"}, {"type": "boolean"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_ANY: dict[str, Any] = {}


def _exact(
    name: str, schema: dict[str, Any], proof: str = _E2E, routes: tuple[str, ...] = ROUTES, sampling: bool = True
) -> Option:
    return Option(name, "exact", schema, proof, routes, sampling=sampling)


def _refused(name: str, *neutral: Any, routes: tuple[str, ...] = ROUTES) -> Option:
    return Option(name, "refused", _ANY, _HTTP, routes, neutral=neutral)


OPTIONS: tuple[Option, ...] = (
    _exact("temperature", {**_NUMBER, "minimum": 0, "maximum": 100}, _LAW),
    _exact("top_p", {**_NUMBER, "exclusiveMinimum": 0, "maximum": 1}, _SHAPED),
    _exact("top_k", {**_INTEGER, "minimum": -1}, _SHAPED),
    _exact("min_p", {**_NUMBER, "minimum": 0, "maximum": 1}, _SHAPED),
    _exact("presence_penalty", {**_NUMBER, "minimum": -2, "maximum": 2}, _SHAPED),
    _exact("frequency_penalty", {**_NUMBER, "minimum": -2, "maximum": 2}, _SHAPED),
    _exact("repetition_penalty", {**_NUMBER, "exclusiveMinimum": 0, "maximum": 100}, _SHAPED),
    _exact(
        "logit_bias", {"type": "object", "additionalProperties": {**_NUMBER, "minimum": -100, "maximum": 100}}, _SHAPED
    ),
    _exact("allowed_token_ids", _IDS, _SHAPED),
    _exact("bad_words", _TEXTS, _SHAPED),
    _exact("min_tokens", {**_INTEGER, "minimum": 0}, _SHAPED),
    _exact("max_tokens", {**_INTEGER, "minimum": 1}, _BAD),
    _exact("max_completion_tokens", {**_INTEGER, "minimum": 1}, _BAD, ("chat",), sampling=False),
    _exact("stop", _TEXTS),
    _exact("stop_token_ids", _IDS),
    _exact("ignore_eos", _FLAG, _BAD),
    _exact("include_stop_str_in_output", _FLAG),
    _exact("skip_special_tokens", _FLAG),
    _exact("seed", _INTEGER),
    _exact("n", {**_INTEGER, "minimum": 1, "maximum": 128}),
    _exact("logprobs", {"anyOf": [_FLAG, {**_INTEGER, "minimum": 0, "maximum": 20}]}, sampling=False),
    _exact("top_logprobs", {**_INTEGER, "minimum": 0, "maximum": 20}, _HTTP, ("chat",), sampling=False),
    _exact("echo", _FLAG, _HTTP, ("completions",), sampling=False),
    _exact("response_format", {"type": "object"}, _STRUCTURED, sampling=False),
    _exact("tools", {"type": "array", "items": {"type": "object"}}, _STRUCTURED, ("chat",), sampling=False),
    _exact("tool_choice", {"anyOf": [{"type": "string"}, {"type": "object"}]}, _STRUCTURED, ("chat",), sampling=False),
    _exact("parallel_tool_calls", _FLAG, _STRUCTURED, ("chat",), sampling=False),
    Option("prompt", "request", _ANY, routes=("completions",)),
    Option("messages", "request", {"type": "array"}, routes=("chat",)),
    Option("model", "request", {"type": "string"}),
    Option("stream", "request", _FLAG),
    Option("stream_options", "request", {"type": "object"}),
    Option("speculative", "request", {"type": "object"}),
    Option("return_token_ids", "request", _FLAG),
    Option("return_meta_info", "request", _FLAG),
    Option("return_tokens_as_token_ids", "request", _FLAG),
    *(
        Option(name, "no effect", _ANY)
        for name in ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
    ),
    _refused("best_of", 1),
    _refused("suffix", ""),
    _refused("functions", []),
    _refused("function_call", "none", "auto"),
    _refused("modalities", ["text"]),
    _refused("prompt_logprobs"),
    *(
        _refused(name)
        for name in (
            "audio",
            "prediction",
            "reasoning_effort",
            "verbosity",
            "web_search_options",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "use_beam_search",
            "length_penalty",
            "early_stopping",
            "truncate_prompt_tokens",
            "logits_processors",
            "typical_p",
            "top_a",
            "mirostat",
            "no_repeat_ngram_size",
            "chat_template",
            "documents",
            "continue_final_message",
            "add_generation_prompt",
            "lora_adapter",
            "thinking",
            "min_length",
        )
    ),
)

BY_NAME = {option.name: option for option in OPTIONS}


def options_of(route: str) -> dict[str, Option]:
    """The fields of one route, by name; a field of the other route alone is refused."""
    return {option.name: option for option in OPTIONS if route in option.routes}


def request_schema(chat: bool) -> dict[str, Any]:
    """JSON schema of a request body; null means omitted."""
    route = "chat" if chat else "completions"
    fields = {name: option for name, option in options_of(route).items() if option.kind != "refused"}
    properties = {
        name: {"anyOf": [option.schema, {"type": "null"}]} if option.schema else {} for name, option in fields.items()
    }
    return {"type": "object", "properties": properties, "required": ["messages" if chat else "prompt"]}


def table() -> str:
    """The Markdown table of README.md."""
    rows = ["| field | | proof |", "| --- | --- | --- |"]
    rows += [f"| `{one.name}` | {one.kind} | `{one.proof}` |" for one in OPTIONS if one.kind == "exact"]
    refused = ", ".join(f"`{one.name}`" for one in OPTIONS if one.kind == "refused")
    rows.append(f"| {refused} | refused: 400 (values that ask for nothing pass) | `{_HTTP}` |")
    ignored = ", ".join(f"`{one.name}`" for one in OPTIONS if one.kind == "no effect")
    rows.append(f"| {ignored} | accepted, no effect | `{_BAD}` |")
    return "\n".join(rows)
