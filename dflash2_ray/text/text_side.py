"""Everything textual about one target: tokenizer, chat template, sampling defaults. `LLM` and `Client` share it."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.errors import InvalidRequest
from dflash2_ray.text.assembly import TextAssembler
from dflash2_ray.text.chat_template import ChatTemplate
from dflash2_ray.text.generation_defaults import read_generation_defaults
from dflash2_ray.text.response_format import response_grammar
from dflash2_ray.text.tokenizer import Tokenizer
from dflash2_ray.text.tool_grammar import tool_grammar
from dflash2_ray.text.tools import ToolUse, parse_tools

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Prepared:
    """A request as an engine takes it. tools: what the answer may call, None where calls are not looked for."""

    token_ids: list[int]
    params: SamplingParams
    tools: ToolUse | None = None


class TextSide:
    """Read from a checkpoint folder; `chat_template` is a path that replaces the folder's own. Raises ConfigError."""

    def __init__(self, folder: Path, generation_config: str, chat_template: str | None = None) -> None:
        self.tokenizer = Tokenizer.from_folder(folder)
        self.template = ChatTemplate.from_folder(folder, chat_template)
        self.defaults = read_generation_defaults(folder, generation_config).sampling

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], generation_config: str) -> "TextSide":
        """From the files that a unit hands out (`Unit.text_files`)."""
        with tempfile.TemporaryDirectory(prefix="dflash2_ray-") as name:
            folder = Path(name)
            for file, content in files.items():
                (folder / file).write_bytes(content)
            override = folder / "chat_template.override"
            return cls(folder, generation_config, str(override) if override.is_file() else None)

    def prepare(
        self,
        prompt: str | None,
        token_ids: Sequence[int] | None,
        messages: Messages | None,
        sampling: Mapping[str, Any],
    ) -> Prepared:
        """Whichever of the three is given, and its options. Raises InvalidRequest, also unless it is exactly one."""
        use, sampling = tool_use(sampling)
        if use is not None and messages is None:
            raise InvalidRequest("tools need messages", param="tools")
        params = self.params(sampling)
        grammar = tool_grammar(use)
        if grammar is not None:
            if params.grammar is not None:
                raise InvalidRequest(
                    "response_format contradicts a tool_choice that must call a tool", param="response_format"
                )
            params = replace(params, grammar=grammar)
        return Prepared(self.prompt_ids(prompt, token_ids, messages, use), params, callable_tools(use))

    def assembler(self, request_id: str, request: Prepared) -> TextAssembler:
        """What turns the request's deltas into text, from now on."""
        return TextAssembler(
            self.tokenizer, request_id, len(request.token_ids), time.perf_counter(), request.params, request.tools
        )

    def prompt_ids(
        self, prompt: str | None, token_ids: Sequence[int] | None, messages: Messages | None, use: ToolUse | None = None
    ) -> list[int]:
        """Token ids of whichever of the three is given. Raises InvalidRequest unless it is exactly one."""
        given = [
            name
            for name, value in (("prompt", prompt), ("prompt_token_ids", token_ids), ("messages", messages))
            if value is not None
        ]
        if len(given) != 1:
            raise InvalidRequest(
                f"give exactly one of prompt, prompt_token_ids and messages, got {given or 'none'}", param="prompt"
            )
        if messages is not None:
            return self.chat_ids(messages, use)
        if prompt is not None:
            if not isinstance(prompt, str):
                raise InvalidRequest(f"prompt must be a string, got {prompt!r}", param="prompt")
            return self.tokenizer.encode(prompt)
        return list(token_ids or ())

    def chat_ids(self, messages: Messages, use: ToolUse | None = None) -> list[int]:
        """Token ids of a conversation in the chat template, asking for the assistant's next turn. Raises InvalidRequest."""
        return self.tokenizer.encode(
            self.template.render(messages, use.shown if use else None), add_special_tokens=False
        )

    def some_prompt(self, text: str) -> list[int]:
        """Token ids of a user's turn in the chat template; of the plain text where the template takes none."""
        try:
            return self.chat_ids([{"role": "user", "content": text}])
        except InvalidRequest:
            return self.tokenizer.encode(text)

    def params(self, sampling: Mapping[str, Any]) -> SamplingParams:
        """Sampling options over the checkpoint's defaults; None means omitted. Raises InvalidRequest."""
        given = {name: value for name, value in sampling.items() if value is not None}
        for name in ("grammar", "bad_words_token_ids"):  # filled in here, from other fields
            if name in given:
                raise InvalidRequest(f"unknown sampling option {name!r}", param=name)
        grammar = response_grammar(given.pop("response_format", None))
        params = SamplingParams.from_keywords(**{**self.defaults, **given, "grammar": grammar})
        return replace(params, bad_words_token_ids=self._sequences(params.bad_words)) if params.bad_words else params

    def _sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of words, as they stand and behind a space."""
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        found = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return tuple(dict.fromkeys(ids for ids in found if ids))


def tool_use(sampling: Mapping[str, Any]) -> tuple[ToolUse | None, dict[str, Any]]:
    """What the three fields about tools ask for, and the other options. Raises InvalidRequest."""
    tools = sampling.get("tools") or None
    use = parse_tools(tools, sampling.get("tool_choice"), sampling.get("parallel_tool_calls") if tools else None)
    return use, {name: value for name, value in sampling.items() if name not in TOOL_FIELDS}


def callable_tools(use: ToolUse | None) -> ToolUse | None:
    """The tools that an answer may call; None where calls are not looked for."""
    return use if use is not None and use.max_calls != 0 else None


def each_choice(sampling: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Keywords of each of the `n` choices: a seed counts up (`SamplingParams.choices`). Raises InvalidRequest."""
    count, seed = sampling.get("n"), sampling.get("seed")
    params = SamplingParams.from_keywords(n=count, seed=seed)
    return [{**sampling, "n": None, "seed": choice.seed} for choice in params.choices()]
