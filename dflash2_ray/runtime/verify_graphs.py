"""The target's pass over requests that decode, as one launch: layers, context rows for the drafter, head.

A bucket is (requests, rows per request, positions). A step's rows lie together at the front; behind them stand rows without a slot and
requests without rows, of which nothing is read or written. Steps that take in prompts run launch by launch. It must not know what
becomes of the results. Shapes: T rows, R requests, V vocabulary, H drafter hidden.
"""

from dataclasses import dataclass

import torch

from dflash2_ray.models.attention import AttentionPlan, KVCache
from dflash2_ray.models.paged_plan import PagedPlan
from dflash2_ray.models.target import Target
from dflash2_ray.runtime.cuda_graphs import MOST_ROWS, GraphBackend, GraphPool, Results, next_bucket, next_reach
from dflash2_ray.runtime.input_batch import InputBatch
from dflash2_ray.runtime.pass_columns import launch_of, pass_columns
from dflash2_ray.runtime.static_inputs import StaticInputs


@dataclass(frozen=True, slots=True)
class _Bucket:
    """reach: positions of a request at most."""

    num_requests: int
    num_rows_each: int
    reach: int

    @property
    def num_rows(self) -> int:
        return self.num_requests * self.num_rows_each


@dataclass(frozen=True)
class Limits:
    """What an engine's steps come to at most; num_rows_each: rows of a request that decodes."""

    num_requests: int
    num_rows_each: int
    num_positions: int
    page_size: int


class VerifyGraphs:
    """projection: the drafter's `fc`, None without a drafter."""

    def __init__(
        self, target: Target, projection: torch.nn.Module | None, cache: KVCache, limits: Limits, backend: GraphBackend
    ) -> None:
        self.graphs: GraphPool[_Bucket] = GraphPool("verification", backend)
        self._target = target
        self._projection = projection
        self._cache = cache
        self._limits = limits
        self._inputs: dict[_Bucket, StaticInputs] = {}
        self._results: Results = {}  # of all buckets in the same memory: logits of their own would add up to gigabytes

    def run(self, batch: InputBatch) -> Results | None:
        """`logits` [T, V] of every row and, with a drafter, `context_rows` [T, H]; they stand until the next run. None where the batch
        has to run launch by launch."""
        bucket = self._bucket(batch)
        if bucket is None or self.graphs.failure is not None:
            return None
        inputs = self._inputs.get(bucket)
        if inputs is None:
            inputs = self._inputs[bucket] = StaticInputs(
                pass_columns(bucket.num_requests, bucket.num_rows, bucket.reach, self._limits.page_size),
                self._target.device,
            )
        spans = batch.attention.spans
        inputs.fill({
            "token_ids": batch.token_ids.numpy(), "positions": batch.positions.numpy(), "slots": batch.attention.slots.numpy(),
            "row_starts": [span.row_start for span in spans], "num_rows": [span.num_rows for span in spans],
            "kv_lens": [span.kv_len for span in spans],
            "page_table": [span.page_ids[: -(-span.kv_len // self._limits.page_size)] for span in spans],
        })  # fmt: skip
        results = self.graphs.run(bucket, lambda: self._launch(bucket, inputs.tensors))
        return {name: value[: batch.token_ids.shape[0]] for name, value in results.items()}

    def _bucket(self, batch: InputBatch) -> _Bucket | None:
        limits, spans = self._limits, batch.attention.spans
        num_rows_each = max(span.num_rows for span in spans)
        num_positions = max(span.kv_len for span in spans)
        every_row = batch.logit_rows is None and batch.num_logit_rows == batch.token_ids.shape[0]
        if not every_row or num_rows_each > limits.num_rows_each or num_positions > limits.num_positions:
            return None
        bucket = _Bucket(
            next_bucket(len(spans), limits.num_requests), next_bucket(num_rows_each, limits.num_rows_each),
            next_reach(num_positions, limits.num_positions),
        )  # fmt: skip
        return bucket if bucket.num_rows <= MOST_ROWS else None

    def _launch(self, bucket: _Bucket, inputs: dict[str, torch.Tensor]) -> Results:
        launch = launch_of(inputs, bucket.num_rows_each, bucket.reach)
        plan = AttentionPlan(inputs["slots"], {}, PagedPlan(self._limits.page_size, (launch,)))
        # one table of rotations for every graph: its address must not change when a longer request comes
        num_positions = self._limits.num_positions
        hidden, features = self._target.forward_planned(
            inputs["token_ids"], inputs["positions"], plan, num_positions, self._cache
        )
        if self._projection is None:
            return self._leave({"logits": self._target.logits(hidden)})
        assert features is not None, "a target with a drafter has taps"
        projection = self._projection
        context_rows = self.graphs.backend.beside(lambda: projection(features))
        logits = self._target.logits(hidden)
        return self._leave({"logits": logits, "context_rows": context_rows()})

    def _leave(self, results: Results) -> Results:
        """Copies of the results, where every bucket leaves them. Launches one by one come before any capture, and make room."""
        for name, value in results.items():
            if name not in self._results:
                most = min(MOST_ROWS, self._limits.num_requests * self._limits.num_rows_each)
                self._results[name] = value.new_empty(most, *value.shape[1:])
            self._results[name][: value.shape[0]].copy_(value)
        return {name: self._results[name][: value.shape[0]] for name, value in results.items()}
