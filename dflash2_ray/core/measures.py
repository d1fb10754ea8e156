"""The one table of everything that is counted: its key in a ledger, the name under which it is exported, and its labels.

A counter's exported name ends in `_total` (Prometheus adds it), a histogram's in `_bucket`, `_sum` and `_count`. Every measure also has
the labels `model_name` and `engine`. The names `vllm:*` mean what they mean in vLLM.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
COMMON_LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class Measure:
    """key: in ledgers and gauges, followed by `/value` for each label in `labels`. values: label values that are exported before they
    occur, at 0. bounds: upper bounds of a histogram's buckets, the last one (infinity) left out. limit: the fact (`Books.facts`) up to
    which bounds, or counts of a position, are exported."""

    key: str
    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    limit: str | None = None

    @property
    def ray_name(self) -> str:
        """The same measure in `ray.util.metrics`, where a colon is not legal."""
        return f"dflash2_{self.name.partition(':')[2]}"


def _one_two_five(limit: float) -> Iterator[float]:
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > limit:
                return
            yield digit * scale
        scale *= 10


_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_INTER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_OUTPUT_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80,
)  # fmt: skip
_STEP_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
_TOKENS = tuple(_one_two_five(10_000_000))
_ACCEPTANCE = tuple(1 + index / 2 for index in range(127))

FINISHED_REASONS = ("stop", "length", "abort", "error")
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
SKIP_REASONS = ("requested", "drafter_unavailable", "drafter_timeout", "context_too_long", "load", "warmup")

MEASURES: tuple[Measure, ...] = (
    # speculation, counted before a stop or limit cuts
    Measure("num_drafts", "vllm:spec_decode_num_drafts", "counter", "Verify steps per request with at least one draft"),
    Measure("num_draft_tokens", "vllm:spec_decode_num_draft_tokens", "counter", "Draft tokens that were verified"),
    Measure(
        "num_accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens",
        "counter",
        "Draft tokens that were accepted, before a stop or limit cuts",
    ),
    Measure(
        "accepted_per_position",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Steps that accepted the draft at this position",
        ("position",),
        limit="num_speculative_tokens",
    ),
    # load
    Measure("running", "vllm:num_requests_running", "gauge", "Requests in steps"),
    Measure("waiting", "vllm:num_requests_waiting", "gauge", "Requests that wait"),
    Measure(
        "waiting_by_reason",
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "Requests that wait, by reason",
        ("reason",),
        ("capacity", "deferred"),
    ),
    Measure("kv_usage", "vllm:kv_cache_usage_perc", "gauge", "Share of the KV pages in use, 0 to 1"),
    Measure(
        "prefix_cache_queries",
        "vllm:prefix_cache_queries",
        "counter",
        "Tokens of requests that were looked up in the prefix cache",
    ),
    Measure("prefix_cache_hits", "vllm:prefix_cache_hits", "counter", "Of them, tokens that were found there"),
    # steps and requests
    Measure("preemptions", "vllm:num_preemptions", "counter", "Requests that lost their pages and were recomputed"),
    Measure("prompt_tokens", "vllm:prompt_tokens", "counter", "Prompt tokens of requests that got their first token"),
    Measure("generation_tokens", "vllm:generation_tokens", "counter", "Tokens generated"),
    Measure(
        "request_success",
        "vllm:request_success",
        "counter",
        "Requests that ended, by how",
        ("finished_reason",),
        FINISHED_REASONS,
    ),
    Measure(
        "admission_rejections",
        "vllm:admission_rejections",
        "counter",
        "Requests refused because the queue was full",
        ("reason",),
        REJECTION_REASONS,
    ),
    Measure(
        "iteration_tokens",
        "vllm:iteration_tokens_total",
        "histogram",
        "Prompt and generated tokens per step",
        bounds=_STEP_TOKENS,
    ),
    Measure(
        "first_token_s",
        "vllm:time_to_first_token_seconds",
        "histogram",
        "From a request's arrival to its first token",
        bounds=_FIRST_TOKEN_S,
    ),
    Measure(
        "inter_token_s",
        "vllm:inter_token_latency_seconds",
        "histogram",
        "Between two steps' tokens of a request, however many they are",
        bounds=_INTER_TOKEN_S,
    ),
    Measure(
        "time_per_token_s",
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "Per request: from first to last token, per token behind the first",
        bounds=_INTER_TOKEN_S,
    ),
    Measure("end_to_end_s", "vllm:e2e_request_latency_seconds", "histogram", "From arrival to end", bounds=_REQUEST_S),
    Measure(
        "queue_s",
        "vllm:request_queue_time_seconds",
        "histogram",
        "From being queued to the first step",
        bounds=_REQUEST_S,
    ),
    Measure(
        "inference_s",
        "vllm:request_inference_time_seconds",
        "histogram",
        "From the first step to the last token",
        bounds=_REQUEST_S,
    ),
    Measure(
        "prefill_s",
        "vllm:request_prefill_time_seconds",
        "histogram",
        "From the first step to the first token",
        bounds=_REQUEST_S,
    ),
    Measure(
        "decode_s",
        "vllm:request_decode_time_seconds",
        "histogram",
        "From the first to the last token",
        bounds=_REQUEST_S,
    ),
    Measure(
        "request_prompt_tokens",
        "vllm:request_prompt_tokens",
        "histogram",
        "Prompt tokens per request",
        bounds=_TOKENS,
        limit="max_model_len",
    ),
    Measure(
        "request_generation_tokens",
        "vllm:request_generation_tokens",
        "histogram",
        "Generated tokens per request",
        bounds=_TOKENS,
        limit="max_model_len",
    ),
    Measure("params_n", "vllm:request_params_n", "histogram", "The option n of requests", bounds=(1, 2, 5, 10, 20)),
    Measure(
        "params_max_tokens",
        "vllm:request_params_max_tokens",
        "histogram",
        "The option max_tokens of requests",
        bounds=_TOKENS,
        limit="max_model_len",
    ),
    # ours
    Measure(
        "emitted_accepted_tokens",
        "dflash2:emitted_accepted_tokens",
        "counter",
        "Accepted drafts that reached the client, behind the stop cut",
    ),
    Measure(
        "acceptance_length",
        "dflash2:request_acceptance_length",
        "histogram",
        "Per finished request: tokens per verify step, bonus included",
        bounds=_ACCEPTANCE,
        limit="most_tokens_per_step",
    ),
    Measure(
        "spec_skipped",
        "dflash2:spec_skipped",
        "counter",
        "Decode steps of a request without drafts, by why",
        ("reason",),
        SKIP_REASONS,
    ),
    Measure(
        "spec_active",
        "dflash2:spec_active",
        "gauge",
        "1: there is a drafter to speculate with; 0: every request decodes plainly",
    ),
    Measure("draft_s", "dflash2:draft_seconds", "histogram", "Work of the drafter for one question", bounds=_STEP_S),
    Measure("verify_s", "dflash2:verify_seconds", "histogram", "A step without its wait for drafts", bounds=_STEP_S),
    Measure(
        "transfer_s",
        "dflash2:transfer_seconds",
        "histogram",
        "From question to answer of a separate drafter, without its work",
        bounds=_STEP_S,
    ),
    Measure(
        "transfer_bytes",
        "dflash2:transfer_bytes",
        "counter",
        "Context rows and candidates to and from a separate drafter",
    ),
    Measure(
        "draft_wait_s",
        "dflash2:draft_wait_seconds",
        "histogram",
        "What a step with drafts waited for them",
        bounds=_STEP_S,
    ),
    Measure(
        "output_token_s",
        "dflash2:output_token_latency_seconds",
        "histogram",
        "Time between a request's steps divided by the tokens they brought, once per token",
        bounds=_OUTPUT_TOKEN_S,
    ),
    Measure("rank_up", "dflash2:rank_up", "gauge", "1: this process of the unit serves", ("role", "rank")),
    Measure("restarts", "dflash2:restarts", "counter", "Starts behind the first one", ("role",), ("target", "drafter")),
)

SGLANG_MEASURES: tuple[Measure, ...] = (
    Measure(
        "window_accept_length", "sglang:spec_accept_length", "gauge", "Tokens per verify step, bonus included, lately"
    ),
    Measure("window_accept_rate", "sglang:spec_accept_rate", "gauge", "Accepted drafts per draft slot, lately"),
    Measure("num_steps", "sglang:spec_num_steps", "gauge", "Draft slots"),
    Measure("num_draft_slots", "sglang:spec_num_draft_tokens", "gauge", "Draft slots and the anchor"),
    Measure("num_verify_passes", "sglang:spec_verify_calls", "counter", "Target passes that verified drafts"),
)

BOUNDS: dict[str, tuple[float, ...]] = {one.key: one.bounds for one in MEASURES if one.kind == "histogram"}
