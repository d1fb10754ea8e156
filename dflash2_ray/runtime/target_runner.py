"""Runs the target on a flat batch: KV cache, forward pass, logits, verification, and the context rows for the drafter.

What is decided next to the logits is decided here; what happens with it is the scheduler's. Shapes: T rows, V
vocabulary, H drafter hidden, R requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dflash2_ray.core.draft_port import Proposal
from dflash2_ray.core.scheduler import Outcome, Planned
from dflash2_ray.errors import UnitLost
from dflash2_ray.models.target import Target
from dflash2_ray.models.upload import upload
from dflash2_ray.runtime.input_batch import InputBatch
from dflash2_ray.runtime.rank_loop import Followers, run_pass
from dflash2_ray.runtime.rejection_launch import RejectionLaunch
from dflash2_ray.runtime.shapers import Grammars, Shapers
from dflash2_ray.runtime.verify_graphs import VerifyGraphs
from dflash2_ray.sampling.logprobs import token_logprobs
from dflash2_ray.sampling.rejection import VerifyRows, verify


@dataclass(frozen=True, slots=True)
class TargetPass:
    """What one pass left: logits [rows that were asked for, V] fp32, and the tapped features [T, F*H_target] if taps are
    set, or the context rows [T, H] that were made of them already. Of a graph it stands until the next pass."""

    logits: torch.Tensor | None
    features: torch.Tensor | None
    context_rows: torch.Tensor | None = None


class TargetRunner:
    """Rank 0 of the target with its KV cache. `projection` is the drafter's `fc`, None without a drafter; `followers` are
    the other ranks, None for a single one; `grammars` makes what constrains an output, None where that is not offered.
    `verify_graphs`: passes that are one launch, where that is used."""

    verify_graphs: VerifyGraphs | None = None

    def __init__(
        self,
        target: Target,
        projection: torch.nn.Module | None,
        *,
        num_pages: int,
        page_size: int,
        followers: Followers | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.followers = followers
        self.shapers = Shapers(grammars)
        self.target = target
        self.projection = projection
        self.cache = target.allocate_cache(num_pages, page_size)
        launches = RejectionLaunch.runs(target.device, target.facts.vocab_size)
        self._at_once = RejectionLaunch(target.device).decide if launches else None

    @torch.inference_mode()
    def forward(self, batch: InputBatch) -> TargetPass:
        """One pass over the batch, on every rank; stores its keys and values. Raises UnitLost when a rank is gone."""
        if self.verify_graphs is not None:
            results = self.verify_graphs.run(batch)
            if results is not None:
                return TargetPass(results["logits"], None, results.get("context_rows"))
        if self.followers is None:
            return TargetPass(*run_pass(self.target, self.cache, batch.on(self.target.device)))
        self.followers.publish(batch)
        try:
            return TargetPass(*run_pass(self.target, self.cache, batch.on(self.target.device)))
        except Exception as error:  # the others are inside this pass: the next one must never meet it
            self.followers.close()
            raise UnitLost(f"target rank 0 failed in a pass of {self.target.shard.size} ranks: {error}") from error

    @torch.inference_mode()
    def verify(
        self, result: TargetPass, planned: Sequence[Planned], proposals: Mapping[str, Proposal]
    ) -> list[Outcome | None]:
        """Accept or replace drafts, row by row, for every planned request that samples."""
        sampling = [part for part in planned if part.samples]
        if not sampling:
            return [None] * len(planned)
        requests = [part.request for part in sampling]
        drafts = [proposals.get(request.request_id) for request in requests]
        params = [request.params for request in requests]
        rows = VerifyRows(
            num_drafts=[len(draft.token_ids) if draft else 0 for draft in drafts],
            drafts=[draft.token_ids if draft else () for draft in drafts],
            candidate_ids=[draft.candidate_ids if draft else None for draft in drafts],
            candidate_probs=[draft.candidate_probs if draft else None for draft in drafts],
            temperature=[param.temperature for param in params],
            top_k=[param.top_k for param in params],
            top_p=[param.top_p for param in params],
            min_p=[param.min_p for param in params],
            seed=[request.seed for request in requests],
            first_position=[len(request.token_ids) for request in requests],
            matching=[request.matching for request in requests],
        )
        assert result.logits is not None, "a batch with sampling rows has logits"
        logits = result.logits[: sum(rows.num_drafts) + len(sampling)]
        shaped, dead = self.shapers.shape(logits, requests, rows.drafts)
        verdict = verify(shaped, rows, at_once=self._at_once)
        outcomes: list[Outcome | None] = []
        start = 0
        for param, drafted, accepted, token in zip(
            params, rows.drafts, verdict.num_accepted, verdict.next_token, strict=True
        ):
            lost = None
            if dead:
                accepted = next(
                    (row for row in range(accepted) if start + row in dead), accepted
                )  # a lost row decides nothing
                lost = dead.get(start + accepted)
            told = None
            if param.logprobs is not None:
                told = token_logprobs(
                    logits[start : start + accepted + 1], [*drafted[:accepted], token], param.logprobs
                )
            outcomes.append(Outcome(drafted, accepted, token if lost is None else None, told, lost))
            start += len(drafted) + 1
        if len(sampling) == len(planned):
            return outcomes
        found = iter(outcomes)
        return [next(found) if part.samples else None for part in planned]

    @torch.inference_mode()
    def prompt_logprobs(self, result: TargetPass, batch: InputBatch, planned: Sequence[Planned]) -> None:
        """Note what this pass tells about prompt tokens, for requests that want to know."""
        start = batch.num_sampling_rows
        for part in planned:
            request = part.request
            if request.prompt_logprobs is None:
                continue
            positions = request.wanted_prompt_positions(part.start, part.num_tokens)
            if positions:
                assert result.logits is not None, "wanted rows have logits"
                tokens = [request.token_ids[position + 1] for position in positions]
                count = request.params.prompt_logprobs or 0
                request.prompt_logprobs += token_logprobs(result.logits[start : start + len(tokens)], tokens, count)
                start += len(tokens)

    @torch.inference_mode()
    def context_rows(self, result: TargetPass, index: torch.Tensor | None) -> torch.Tensor:
        """Context rows [n, H] before the drafter's norm, for the rows of the batch that `index` [n] names; None: all of them."""
        assert self.projection is not None, "context rows were asked for without a drafter"
        if result.context_rows is not None:
            kept = result.context_rows  # the graph writes them again
            return kept.clone() if index is None else kept.index_select(0, upload(index, kept.device))
        assert result.features is not None, "the target was loaded without taps"
        features = result.features
        return self.projection(features if index is None else features.index_select(0, upload(index, features.device)))
