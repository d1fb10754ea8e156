"""`LLM`: the whole engine in this process, without Ray: the same loop, the same results as the service.

It owns one loop and steps it in the caller's thread. It must not know actors or HTTP.
"""

import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash2_ray.config import DrafterFacts, EngineConfig, ServiceConfig, TargetFacts
from dflash2_ray.core.generation import Generation, GenerationChunk
from dflash2_ray.core.messages import RequestDelta, RequestSpec
from dflash2_ray.core.wire import unpack_error
from dflash2_ray.errors import ConfigError, InvalidRequest
from dflash2_ray.runtime.build import Blueprint, build_from_blueprint, draw_blueprint
from dflash2_ray.runtime.warm_up import measure
from dflash2_ray.text.assembly import TextAssembler
from dflash2_ray.text.text_side import Messages, Prepared, TextSide

Progress = Callable[[str, float, float], None]
_MEASURE_S = 1.0  # less than a service takes: whoever builds an `LLM` waits for it


class LLM:
    """The engine in this process.

    Keywords are those of `ServiceConfig`; `progress(phase, done, total)` is called while weights load.
    Raises ConfigError or CheckpointError.
    """

    def __init__(
        self, target: str = "embedded", drafter: str | None = None, *, progress: Progress | None = None, **config: Any
    ):
        service = ServiceConfig.from_keys({"target": target, "drafter": drafter, **config})
        if service.tensor_parallel_size > 1 or service.drafter_placement == "separate":
            raise ConfigError(
                "LLM runs in one process: expected tensor_parallel_size=1 and a colocated drafter, got "
                f"tensor_parallel_size={service.tensor_parallel_size}, drafter_placement={service.drafter_placement}; serve it instead"
            )
        blueprint = draw_blueprint(service, progress)
        self._text = TextSide(blueprint.target_folder, service.generation_config, service.chat_template)
        self.tokenizer = self._text.tokenizer
        self._loop = build_from_blueprint(blueprint, service, progress)
        measure(self._loop, progress, limit_s=_MEASURE_S)
        self.config: EngineConfig = self._loop.config
        self._lock = threading.Lock()
        self._inbox: dict[str, deque[RequestDelta]] = {}

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        max_in_flight: int | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Complete one or more prompts (texts or token ids), results in order; all submitted at once, or at most
        `max_in_flight` of them. With n > 1, the choices of a prompt lie side by side.

        Sampling keywords have the names of the HTTP fields. Raises InvalidRequest before anything runs.
        """
        params = self._text.params(sampling)
        return self._run(
            [Prepared(list(ids), params) for ids in self._prompt_ids(prompts, prompt_token_ids)], max_in_flight
        )

    def chat(
        self, messages: Messages | Sequence[Messages], *, max_in_flight: int | None = None, **sampling: Any
    ) -> list[Generation]:
        """Answer one conversation, or several, results and `max_in_flight` as in `generate`."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prepared = [self._text.prepare(None, None, conversation, sampling) for conversation in conversations]  # type: ignore[arg-type]
        return self._run(prepared, max_in_flight)

    def stream(
        self,
        prompt: str | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        **sampling: Any,
    ) -> Iterator[GenerationChunk]:
        """Chunks of one generation, one per step. Closing the iterator cancels the request."""
        return self._stream(self._text.prepare(prompt, prompt_token_ids, messages, sampling))

    def _stream(self, prepared: Prepared) -> Iterator[GenerationChunk]:
        request_id, assembler = self._submit(prepared)
        try:
            finished = False
            while not finished:
                for delta in self._receive(request_id):
                    chunk = self._push(assembler, delta)
                    finished = chunk.finish_reason is not None
                    yield chunk
                    if finished:  # at a stop string, perhaps, with more deltas behind it
                        break
        finally:
            self._forget(request_id)

    # ---- driving the loop -------------------------------------------------------------------------------------------

    def _run(self, requests: Sequence[Prepared], max_in_flight: int | None = None) -> list[Generation]:
        choices = [replace(one, params=choice) for one in requests for choice in one.params.choices()]
        for choice in choices:  # a bad one is told before any of the others runs
            self._loop.check(RequestSpec("", tuple(choice.token_ids), choice.params))
        waiting = deque(enumerate(choices))
        running: dict[str, tuple[int, TextAssembler]] = {}
        results: dict[int, Generation] = {}
        try:
            while waiting or running:
                while waiting and self._loop.scheduler.has_room() and len(running) < (max_in_flight or len(choices)):
                    index, choice = waiting.popleft()
                    request_id, assembler = self._submit(choice)
                    running[request_id] = (index, assembler)
                self._drive()
                for request_id in list(running):
                    index, assembler = running[request_id]
                    for delta in self._drain(request_id):
                        chunk = self._push(assembler, delta)
                        if chunk.generation is not None:
                            results[index] = chunk.generation
                            del running[request_id]
                            self._forget(request_id)
                            break
        finally:
            for request_id in running:
                self._forget(request_id)
        return [results[index] for index in range(len(choices))]

    def _submit(self, request: Prepared) -> tuple[str, TextAssembler]:
        request_id = f"llm-{uuid.uuid4().hex}"
        with self._lock:
            self._loop.add(RequestSpec(request_id, tuple(request.token_ids), request.params))
            self._inbox[request_id] = deque()
        return request_id, self._text.assembler(request_id, request)

    def _drive(self) -> None:
        """One step; its deltas go to whoever waits for them."""
        with self._lock:
            for delta in self._loop.step():
                inbox = self._inbox.get(delta.request_id)
                if inbox is not None:
                    inbox.append(delta)

    def _receive(self, request_id: str) -> list[RequestDelta]:
        while not (deltas := self._drain(request_id)):
            self._drive()
        return deltas

    def _drain(self, request_id: str) -> list[RequestDelta]:
        inbox = self._inbox[request_id]
        deltas = list(inbox)
        inbox.clear()
        return deltas

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._loop.abort(request_id)
            self._inbox.pop(request_id, None)

    @staticmethod
    def _push(assembler: TextAssembler, delta: RequestDelta) -> GenerationChunk:
        if delta.finish_reason == "error":
            raise unpack_error(delta.error or {"kind": "StepFailed", "message": "the step failed"})
        return assembler.push(delta)

    # ---- prompts ------------------------------------------------------------------------------------------------

    def _prompt_ids(
        self, prompts: str | Sequence[str] | None, prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None
    ) -> list[Sequence[int]]:
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidRequest("give either prompts or prompt_token_ids", param="prompt")
        if prompts is not None:
            texts = [prompts] if isinstance(prompts, str) else list(prompts)
            for text in texts:
                if not isinstance(text, str):
                    raise InvalidRequest(f"a prompt must be a string, got {text!r}", param="prompt")
            return [self.tokenizer.encode(text) for text in texts]
        ids = list(prompt_token_ids or ())
        if ids and all(isinstance(one, (list, tuple)) for one in ids):
            return ids  # type: ignore[return-value]
        return [ids]  # type: ignore[list-item]

    def chat_ids(self, messages: Messages) -> Sequence[int]:
        """Token ids of a conversation in the chat template, asking for the assistant's next turn."""
        return self._text.chat_ids(messages)

    # ---- facts ----------------------------------------------------------------------------------------------------

    def hold_draft_width(self, width: int | None) -> None:
        """Draft at `width` (batch-wide, 0 … num_speculative_tokens) whatever the load, until None lets it follow the load again."""
        most = self.config.num_speculative_tokens
        if width is not None and not 0 <= width <= most:
            raise ConfigError(f"width: expected 0 to num_speculative_tokens={most}, got {width}")
        with self._lock:
            self._loop.control.force(width)

    def describe(self) -> dict[str, Any]:
        """What runs, and how full it is."""
        return self._loop.describe()

    def close(self) -> None:
        """Release the models. The object must not be used afterwards."""
        self._loop.close()


@dataclass(frozen=True)
class CheckReport:
    """What `dflash2-ray check` shows: everything that is decided before a weight is read. Sizes in bytes."""

    config: EngineConfig
    target: TargetFacts
    drafter: DrafterFacts | None
    target_folder: str
    drafter_folder: str | None
    memory: tuple[tuple[str, int], ...]
    warnings: tuple[str, ...]


def check_config(config: ServiceConfig, progress: Progress | None = None) -> CheckReport:
    """Resolve and validate without reading a weight. Raises ConfigError or CheckpointError."""
    blueprint = draw_blueprint(config, progress)
    num_ranks = blueprint.config.tensor_parallel_size
    each = f", each of {num_ranks} ranks" if num_ranks > 1 else ""
    memory = [(f"target weights{each}", blueprint.target.weight_bytes // num_ranks)]
    memory.append((f"key/value pages{each}", blueprint.config.kv_bytes))
    if blueprint.drafter:
        separate = blueprint.config.drafter_placement == "separate"
        where = " in a process of its own" if separate else " in rank 0" if num_ranks > 1 else ""
        memory.append((f"drafter weights{where}", blueprint.drafter.weight_bytes))
    return CheckReport(
        config=blueprint.config,
        target=blueprint.target,
        drafter=blueprint.drafter,
        target_folder=str(blueprint.target_folder),
        drafter_folder=str(blueprint.drafter_folder) if blueprint.drafter_folder else None,
        memory=tuple(memory),
        warnings=_warnings(blueprint),
    )


def _warnings(blueprint: Blueprint) -> tuple[str, ...]:
    found = []
    engine, drafter = blueprint.config, blueprint.drafter
    if drafter and drafter.max_position_embeddings < engine.max_model_len:
        found.append(
            f"the drafter reaches {drafter.max_position_embeddings} positions, max_model_len is {engine.max_model_len}: "
            "beyond the drafter's range requests decode plainly"
        )
    if not drafter:
        found.append("no drafter: every request decodes plainly")
    return tuple(found)
