"""The one flat, strict configuration, and its pure resolution into what an engine runs with.

`ServiceConfig` is what users write (YAML, `key=value`, keywords): `auto` exists only here. `resolve()` turns it, with
facts about the machine and the two checkpoints, into an `EngineConfig` in which nothing is left to decide.
This module reads no file and imports neither torch nor ray.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dflash2_ray.errors import ConfigError

MIB = 1024 * 1024
Dtype = Literal["float32", "bfloat16"]


class Autoscaling(BaseModel):
    """How many units there may be, and what brings another one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(ge=1)
    target_queue_wait_s: float = Field(1.0, gt=0)  # age of the oldest request without a first token, mean over units
    max_kv_usage: float = Field(0.9, gt=0, le=1)  # share of the KV pages in use, mean over units
    upscale_delay_s: float = Field(5.0, ge=0)
    downscale_delay_s: float = Field(300.0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _read_range(cls, data: Any) -> Any:
        if isinstance(data, str):
            low, sign, high = data.partition("-")
            if not (sign and low.isdecimal() and high.isdecimal()):
                raise ValueError(f"expected MIN-MAX, or a mapping with max_replicas and others, got {data!r}")
            return {"min_replicas": int(low), "max_replicas": int(high)}
        return data

    @model_validator(mode="after")
    def _check_range(self) -> "Autoscaling":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas={self.min_replicas} is more than max_replicas={self.max_replicas}")
        return self


class ServiceConfig(BaseModel):
    """Every key of the service. Same words as vLLM where the meaning is the same."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    target: str = Field("embedded", description="Target model: `embedded`, `smollm2`, a local folder or a hub id.")
    drafter: str | None = Field(
        None,
        description="DFlash 2 drafter: a local folder or hub id; `none` switches speculation off. "
        "Default: the embedded drafter for the embedded target, none otherwise.",
    )
    target_revision: str | None = Field(None, description="Hub revision of the target.")
    drafter_revision: str | None = Field(None, description="Hub revision of the drafter.")
    served_model_name: str | None = Field(None, description="Model name in the API; default: the target's.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="Weight type; auto: the checkpoint's.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where both models run.")
    chat_template: str | None = Field(None, description="Path of a Jinja chat template that replaces the tokenizer's.")
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="auto: stop tokens and sampling defaults from the target's generation_config.json."
    )
    max_model_len: int | None = Field(None, ge=2, description="Prompt plus completion, in tokens.")
    tensor_parallel_size: int = Field(1, ge=1, description="Target ranks; one GPU each (on a CPU: one process each).")
    drafter_placement: Literal["auto", "colocated", "separate"] = Field(
        "auto",
        description="colocated: inside target rank 0; separate: an actor and, on GPUs, a GPU of its own. auto: separate "
        "where the cluster has a GPU to spare, else colocated.",
    )
    num_speculative_tokens: int | None = Field(
        None, ge=0, description="Draft slots per request; default: draft block size - 1. 0 switches speculation off."
    )
    rank_placement: Literal["pack", "spread"] = Field(
        "pack",
        description="pack: all target ranks of a unit on one node; spread: each rank may sit on a node of its own.",
    )
    target_labels: dict[str, str] = Field(
        default_factory=dict, description="Ray node labels that the target ranks ask for, as key=value,key=value."
    )
    drafter_labels: dict[str, str] = Field(
        default_factory=dict, description="Ray node labels that a separate drafter asks for, as key=value,key=value."
    )
    step_timeout_s: float = Field(
        30.0, gt=0, description="A step that takes longer means a hung rank: the unit's ranks are replaced."
    )
    resume_timeout_s: float = Field(
        120.0,
        ge=0,
        description="How long a request waits for a unit that can go on with it before its client sees an error.",
    )
    draft_width: Literal["auto", "fixed"] = Field(
        "auto",
        description="auto: the drafted tokens per request follow the load, up to num_speculative_tokens, by measured step "
        "times and acceptance; 0 included. fixed: always num_speculative_tokens.",
    )
    draft_deadline_ms: float | None = Field(
        None,
        gt=0,
        description="How long a step waits for a proposal before its request decodes plainly; default: from the "
        "measured proposal times.",
    )
    pipeline: Literal["auto", "serial", "split"] = Field(
        "auto",
        description="serial: draft, then verify. split: two halves of the batch, one drafted while the other is verified "
        "(needs a separate drafter). auto: chosen from measured times.",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description="auto: on a GPU with one target rank, what a decode step launches is captured once per size and launched as one; "
        "off: launch by launch.",
    )
    page_size: int = Field(16, ge=1, le=1024, description="Tokens per KV page.")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of a GPU that this service may fill.")
    num_kv_pages: int | None = Field(None, ge=1, description="KV pages; default: from the memory at hand.")
    enable_prefix_caching: bool = Field(
        True,
        description="A prompt that begins like an earlier one, or like its answer, starts behind what they share, in whole pages.",
    )
    max_num_seqs: int = Field(16, ge=1, le=1024, description="Requests that may run at once.")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="Tokens of one step; default 512 or more.")
    max_queued_requests: int = Field(256, ge=0, description="Requests that may wait; beyond it a 429.")
    max_queued_tokens: int = Field(
        262_144,
        ge=1,
        description="Prompt tokens that may wait to be computed; beyond it a 429 (one request alone is always taken).",
    )
    api_keys_file: str | None = Field(
        None,
        description="Path of a file with one API key per line; keys in the environment variable DFLASH2_API_KEYS (separated by "
        "commas) are added. A changed file is followed within seconds. Default: no key is asked for.",
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="Origins whose pages may call the service from a browser, as a,b; `*` for all. Default: none."
    )
    max_body_bytes: int = Field(8 * MIB, ge=1, description="Largest HTTP request body; beyond it a 413.")
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        description="How long an HTTP request may take in all, queue included; beyond it a 504. Default: no limit.",
    )
    strict_fields: bool = Field(
        False,
        description="Refuse HTTP requests with fields that nobody here knows, instead of reporting them in a header.",
    )
    num_replicas: int = Field(1, ge=1, description="Units (target ranks plus drafter).")
    routing: Literal["load", "session"] = Field(
        "load",
        description="load: a request goes to the unit with fewer requests of two. session: requests of one session (header "
        "x-session-id, x-session-affinity or x-correlation-id) go to one unit while it lives and has room, others to any.",
    )
    autoscaling: Autoscaling | None = Field(
        None,
        description="Units by load: `1-4`, or a mapping of min_replicas, max_replicas, target_queue_wait_s (1), max_kv_usage (0.9), "
        "upscale_delay_s (5) and downscale_delay_s (300). num_replicas is then the number at the start. Default: always num_replicas.",
    )
    num_ingress_replicas: int = Field(
        1,
        ge=1,
        description="HTTP front-ends; with autoscaling the least number of them, which grows in proportion to the units that may come.",
    )
    drain_timeout_s: float = Field(
        60.0,
        ge=0,
        description="How long a replica that is to go (scale-down, redeploy, shutdown) lets its running requests finish; what "
        "is left then goes on at another unit, if there is one.",
    )
    startup_probe: Literal["warn", "refuse", "off"] = Field(
        "warn",
        description="A real generation before a unit is ready. warn: says so in the log and in /server_info when the drafter is "
        "accepted less than acceptance_floor; refuse: does not start then; off: no generation.",
    )
    acceptance_floor: float = Field(
        1.1,
        ge=1,
        description="Tokens per verify step, bonus included, that the start-up probe expects of a drafter that fits its target.",
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="json: one JSON object per log line, in the replicas' files and in the workers' standard error. text: lines, "
        "or what Serve's own logging_config says.",
    )
    sglang_metrics: bool = Field(False, description="Export SGLang's `sglang:spec_*` gauges in /metrics as well.")
    seed: int | None = Field(
        None, description="Makes unseeded requests reproducible by request id, whatever the drafter does."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    near = difflib.get_close_matches(str(key), list(cls.model_fields), n=1)
                    hint = (
                        f"; did you mean {near[0]!r}?"
                        if near
                        else f". Known keys: {', '.join(sorted(cls.model_fields))}"
                    )
                    raise ValueError(f"unknown key {key!r}{hint}")
                if key == "cors_origins" and isinstance(data[key], str):
                    data = {**data, key: [origin.strip() for origin in data[key].split(",") if origin.strip()]}
                if key in _LABELS and isinstance(data[key], str):
                    try:
                        data = {**data, key: read_labels([pair for pair in data[key].split(",") if pair])}
                    except ConfigError as error:
                        raise ValueError(f"{key}: {error}") from None
                if (
                    isinstance(data[key], bool) and cls.model_fields[key].annotation is not bool
                ):  # pydantic would take True for 1
                    raise ValueError(f"{key}: expected a number or a word, got {data[key]!r}")
        return data

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            parts = urlsplit(origin)
            if origin != "*" and (not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"):
                raise ValueError(f"expected `*` or scheme://host[:port] without a path, got {origin!r}")
        return origins

    @model_validator(mode="after")
    def _check_num_replicas(self) -> "ServiceConfig":
        scaling = self.autoscaling
        if scaling is not None and not scaling.min_replicas <= self.num_replicas <= scaling.max_replicas:
            raise ValueError(
                f"num_replicas={self.num_replicas} is outside autoscaling={scaling.min_replicas}-{scaling.max_replicas}"
            )
        return self

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any]) -> "ServiceConfig":
        """Validate a mapping of keys. Raises ConfigError with one line per problem: key, what was expected, what was got."""
        try:
            return cls.model_validate(dict(keys))
        except ValidationError as error:
            raise ConfigError("; ".join(_problem(row) for row in error.errors())) from None

    def tuned(self, keys: Mapping[str, Any]) -> "ServiceConfig":
        """These settings with what Serve's `user_config` changes in place. Raises ConfigError for what needs a new deployment."""
        for key in keys:
            if key in type(self).model_fields and key not in TUNABLES:
                raise ConfigError(
                    f"user_config: {key!r} cannot change in place, only {', '.join(TUNABLES)}; change `args` and deploy again"
                )
        tuned = self.from_keys({**self.model_dump(), **keys})
        for key in _QUEUE_LIMITS:
            if getattr(tuned, key) > getattr(self, key):
                raise ConfigError(
                    f"user_config: {key} can be lowered in place, to {getattr(self, key)} at most, got {getattr(tuned, key)}"
                )
        return tuned

    @property
    def max_num_replicas(self) -> int:
        """Units at most."""
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def wants_drafter(self) -> bool:
        """Whether the settings ask for a drafter (a target without one of its own runs plain by default)."""
        if self.num_speculative_tokens == 0 or (self.drafter or "").lower() == "none":
            return False
        return self.drafter is not None or self.target == "embedded"


_LABELS = ("target_labels", "drafter_labels")
_QUEUE_LIMITS = ("max_queued_requests", "max_queued_tokens")
TUNABLES = (*_QUEUE_LIMITS, "draft_deadline_ms", "request_timeout_s", "resume_timeout_s", "strict_fields")


def read_labels(pairs: Sequence[str]) -> dict[str, str]:
    """Node labels from `key=value` words. Raises ConfigError."""
    labels = {}
    for key, sign, value in (pair.partition("=") for pair in pairs):
        if not sign or not key:
            raise ConfigError(f"labels: expected key=value, got {key!r}")
        labels[key] = value
    return labels


def _problem(row: Any) -> str:
    key = ".".join(str(part) for part in row["loc"])
    message = str(row["msg"]).removeprefix("Value error, ")
    return f"{key}: {message}, got {row['input']!r}" if key else message


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What this process can use. Sizes in bytes."""

    num_gpus: int
    gpu_memory_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What the target's config.json says. `dtype` is the checkpoint's, as torch spells it without the prefix."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str
    weight_bytes: int

    def kv_bytes_per_token(self, item_bytes: int, num_ranks: int = 1) -> int:
        """Bytes of keys and values of all layers for one token on one of `num_ranks` ranks."""
        heads = max(1, self.num_kv_heads // num_ranks)
        return self.num_layers * 2 * heads * self.head_dim * item_bytes


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What the drafter's config.json says; `draft_block_size` counts the anchor. context_window: how many positions in front of a draft
    block any layer sees, None for all."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    draft_block_size: int
    max_position_embeddings: int
    weight_bytes: int
    context_window: int | None = None

    def kv_bytes_per_token(self, item_bytes: int) -> int:
        """Bytes of context keys and values of all draft layers for one token."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * item_bytes


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine runs with: no `auto`, no None that means "choose"."""

    target: str
    drafter: str | None
    served_model_name: str
    dtype: Dtype
    device: Literal["cpu", "cuda"]
    max_model_len: int
    tensor_parallel_size: int
    drafter_placement: Literal["colocated", "separate"]
    num_speculative_tokens: int
    draft_width: Literal["auto", "fixed"]
    draft_deadline_ms: float | None  # None: follows the measured proposal times
    pipeline: Literal["serial", "split", "auto"]
    step_timeout_s: float
    cuda_graphs: bool
    page_size: int
    num_kv_pages: int
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    seed: int | None
    drafter_max_model_len: int
    drafter_window: int | None  # positions in front of a draft block that the drafter sees; None: all
    kv_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for reports and `/server_info`."""
        return asdict(self)


def resolve(
    config: ServiceConfig, machine: MachineFacts, target: TargetFacts, drafter: DrafterFacts | None
) -> EngineConfig:
    """Decide everything that `auto` and None left open. Pure: same arguments, same result.

    Raises ConfigError naming the key, the value got and the values allowed.
    """
    device = _resolve_device(config, machine)
    speculative_tokens = _resolve_speculative_tokens(config, drafter)
    max_model_len = _resolve_max_model_len(config, target)
    batched_tokens = _resolve_batched_tokens(config, speculative_tokens)
    dtype: Dtype = (
        "float32" if config.dtype == "float32" or (target.dtype == "float32" and config.dtype == "auto") else "bfloat16"
    )
    item_bytes = 4 if device == "cpu" else {"float32": 4, "bfloat16": 2}[dtype]
    placement = _resolve_placement(config, drafter)
    check_ranks(config.tensor_parallel_size, target)
    per_token = target.kv_bytes_per_token(item_bytes, config.tensor_parallel_size)
    weight_bytes = target.weight_bytes // config.tensor_parallel_size
    if drafter and placement == "colocated":
        per_token += drafter.kv_bytes_per_token(item_bytes)
        weight_bytes += drafter.weight_bytes
    if speculative_tokens and config.enable_prefix_caching and drafter:
        per_token += drafter.hidden_size * item_bytes  # the context row that is kept beside it
    pages = _resolve_pages(config, machine, device, weight_bytes, per_token, max_model_len, speculative_tokens)
    return EngineConfig(
        target=config.target,
        drafter=(config.drafter or drafter.name) if drafter else None,
        served_model_name=config.served_model_name or target.name,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        tensor_parallel_size=config.tensor_parallel_size,
        drafter_placement=placement,
        num_speculative_tokens=speculative_tokens,
        draft_width=config.draft_width,
        draft_deadline_ms=config.draft_deadline_ms,
        pipeline="serial" if placement == "colocated" else config.pipeline,
        step_timeout_s=config.step_timeout_s,
        cuda_graphs=config.cuda_graphs == "auto" and device == "cuda",
        page_size=config.page_size,
        num_kv_pages=pages,
        enable_prefix_caching=config.enable_prefix_caching,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batched_tokens,
        max_queued_requests=config.max_queued_requests,
        seed=config.seed,
        drafter_max_model_len=drafter.max_position_embeddings if drafter else 0,
        drafter_window=drafter.context_window if drafter else None,
        kv_bytes=pages * config.page_size * per_token,
    )


def check_ranks(num_ranks: int, target: TargetFacts) -> None:
    """Whether the target's heads can be divided: query heads evenly, key/value heads evenly or replicated evenly.

    Raises ConfigError naming both numbers.
    """
    if target.num_heads % num_ranks:
        raise ConfigError(
            f"tensor_parallel_size: {num_ranks} ranks cannot share the {target.num_heads} query heads of {target.name!r} evenly"
        )
    if target.num_kv_heads % num_ranks and num_ranks % target.num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size: {num_ranks} ranks can neither share nor replicate the {target.num_kv_heads} key/value heads "
            f"of {target.name!r} evenly"
        )


def _resolve_placement(config: ServiceConfig, drafter: DrafterFacts | None) -> Literal["colocated", "separate"]:
    """`auto` that reaches an engine means one process: only a unit knows of GPUs to spare, and says so (`engine.placement`)."""
    separate = config.drafter_placement == "separate" and drafter is not None
    if config.pipeline == "split" and not separate:
        raise ConfigError("pipeline: `split` needs drafter_placement=separate and a drafter; use serial or auto")
    return "separate" if separate else "colocated"


def _resolve_device(config: ServiceConfig, machine: MachineFacts) -> Literal["cpu", "cuda"]:
    if config.device == "cuda" and machine.num_gpus == 0:
        raise ConfigError("device: `cuda` was asked for, but this process sees no GPU; use device=cpu or device=auto")
    if config.device == "auto":
        return "cuda" if machine.num_gpus else "cpu"
    return config.device


def _resolve_speculative_tokens(config: ServiceConfig, drafter: DrafterFacts | None) -> int:
    if drafter is None:
        if config.num_speculative_tokens:
            raise ConfigError(
                f"num_speculative_tokens: {config.num_speculative_tokens} draft slots were asked for, but no drafter is "
                f"configured for target {config.target!r}; set `drafter`"
            )
        return 0
    most = drafter.draft_block_size - 1
    asked = most if config.num_speculative_tokens is None else config.num_speculative_tokens
    if asked > most:
        raise ConfigError(
            f"num_speculative_tokens: drafter {drafter.name!r} was trained with a draft block of "
            f"{drafter.draft_block_size} rows (anchor included), so at most {most}, got {asked}"
        )
    return asked


def _resolve_max_model_len(config: ServiceConfig, target: TargetFacts) -> int:
    limit = target.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len: target {target.name!r} supports {limit} positions, got {config.max_model_len}"
        )
    return config.max_model_len


def _resolve_batched_tokens(config: ServiceConfig, speculative_tokens: int) -> int:
    least = config.max_num_seqs * (speculative_tokens + 1)
    if config.max_num_batched_tokens is None:
        return max(512, least)
    if config.max_num_batched_tokens < least:
        raise ConfigError(
            f"max_num_batched_tokens: one step must hold max_num_seqs × (num_speculative_tokens + 1) = "
            f"{config.max_num_seqs} × {speculative_tokens + 1} = {least} tokens, got {config.max_num_batched_tokens}"
        )
    return config.max_num_batched_tokens


def _resolve_pages(
    config: ServiceConfig,
    machine: MachineFacts,
    device: str,
    weight_bytes: int,
    kv_bytes_per_token: int,
    max_model_len: int,
    speculative_tokens: int,
) -> int:
    """Pages of the KV pool. One request of full length plus its look-ahead must fit, so that any admitted request can
    always run alone."""
    least = -(-(max_model_len + speculative_tokens) // config.page_size)
    if config.num_kv_pages is not None:
        if config.num_kv_pages < least:
            raise ConfigError(
                f"num_kv_pages: one request of max_model_len={max_model_len} tokens needs {least} pages of "
                f"{config.page_size}, got {config.num_kv_pages}; raise it or lower max_model_len"
            )
        return config.num_kv_pages
    page_bytes = config.page_size * kv_bytes_per_token
    if device == "cuda":
        budget = int(machine.gpu_memory_bytes * config.gpu_memory_utilization) - weight_bytes - 1024 * MIB
    else:
        budget = min(machine.memory_bytes // 4, 4096 * MIB)
    if budget < least * page_bytes:
        raise ConfigError(
            f"num_kv_pages: one request of max_model_len={max_model_len} tokens needs {least * page_bytes // MIB} MiB of KV, "
            f"but {max(budget, 0) // MIB} MiB are left; lower max_model_len"
        )
    wanted = config.max_num_seqs * least
    return min(budget // page_bytes, wanted)
