"""The standard rule for all requests of a step in a few launches and one read by the host, where `sparse_rejection` has a kernel.

Elsewhere `sampling.rejection` decides, request by request; seeded requests, which draw by token matching, are always its own. It must not
know steps. Shapes: R requests, T rows of logits, V vocabulary, S slots, C candidates.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from dflash2_kernels.integer_softmax import LARGEST_VOCAB
from dflash2_kernels.rejection import OPERATOR, RejectionRows, sparse_rejection
from dflash2_ray.models.upload import upload
from dflash2_ray.runtime.cuda_graphs import next_bucket
from dflash2_ray.runtime.static_inputs import Column, StaticInputs
from dflash2_ray.sampling.rejection import Verdict, VerifyRows


class RejectionLaunch:
    """Buffers for what the host says of a step's requests, by (requests, slots)."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = str(device)
        self._inputs: dict[tuple[int, int], StaticInputs] = {}

    @staticmethod
    def runs(device: torch.device | str, vocab_size: int) -> bool:
        return OPERATOR.has_kernel(device) and vocab_size <= LARGEST_VOCAB

    def decide(self, logits: torch.Tensor, rows: VerifyRows) -> Verdict:
        """logits fp32 [T, V] → greedy requests and those of the standard rule, decided; matching ones as if they were greedy, which
        means nothing."""
        count, num_slots = len(rows.num_drafts), max(1, *rows.num_drafts)
        first_row = [0]
        for drafts in rows.num_drafts:
            first_row.append(first_row[-1] + drafts + 1)
        own = self._columns(count, num_slots)
        own.fill({
            "first_row": first_row, "drafts": rows.drafts,
            "temperature": [0.0 if matched else one for one, matched in zip(rows.temperature, rows.matching, strict=True)],
            "top_k": rows.top_k, "top_p": rows.top_p, "min_p": rows.min_p, "positions": rows.first_position,
            "seeds": [seed - (1 << 64) if seed >> 63 else seed for seed in rows.seed],
        })  # fmt: skip
        ids, probs = _candidates(rows, num_slots, logits.device)
        numbers = {name: one[: count + (name == "first_row")] for name, one in own.tensors.items()}
        accepted, tokens = sparse_rejection(logits, RejectionRows(candidate_ids=ids, candidate_probs=probs, **numbers))
        told = torch.stack([accepted.to(torch.int64), tokens]).tolist()  # the step's one read
        return Verdict(told[0], told[1])

    def _columns(self, count: int, num_slots: int) -> StaticInputs:
        most = next_bucket(count, 1 << 30)
        found = self._inputs.get((most, num_slots))
        if found is None:
            kinds = {
                "temperature": "float32", "top_k": "int32", "top_p": "float32", "min_p": "float32", "seeds": "int64",
                "positions": "int64",
            }  # fmt: skip
            columns = {name: Column((most,), kind) for name, kind in kinds.items()}
            columns |= {"first_row": Column((most + 1,), "int32"), "drafts": Column((most, num_slots))}
            found = self._inputs[most, num_slots] = StaticInputs(columns, self._device)
        return found


def _candidates(rows: VerifyRows, num_slots: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The realised q rows of all requests: ids [R, S, C] int64, -1 where there is none, and probabilities [R, S, C] fp32."""
    given = [
        (own, probs) if own is not None and probs is not None else None
        for own, probs in zip(rows.candidate_ids, rows.candidate_probs, strict=True)
    ]
    width = max((one[0].shape[1] for one in given if one is not None), default=1)
    place = next((one[0].device for one in given if one is not None), torch.device("cpu"))
    none = torch.full((num_slots, width), -1, device=place), torch.zeros(num_slots, width, device=place)
    pairs = []
    for one, drafts in zip(given, rows.drafts, strict=True):
        if one is not None:
            pairs.append((_padded(one[0], num_slots, width, -1), _padded(one[1], num_slots, width, 0)))
        elif drafts:
            pairs.append(_certain(drafts, num_slots, width, place))
        else:
            pairs.append(none)
    ids, probs = (torch.stack(part) for part in zip(*pairs, strict=True))
    return upload(ids, device) if place.type == "cpu" else ids, upload(probs, device) if place.type == "cpu" else probs


def _padded(part: torch.Tensor, num_slots: int, width: int, value: int) -> torch.Tensor:
    missing = (0, width - part.shape[1], 0, num_slots - part.shape[0])
    return F.pad(part, missing, value=value) if any(missing) else part


def _certain(
    drafts: Sequence[int], num_slots: int, width: int, place: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A draft without q was not drawn: itself, with probability 1."""
    ids, probs = torch.full((num_slots, width), -1), torch.zeros(num_slots, width)
    ids[: len(drafts), 0] = torch.tensor(drafts)
    probs[: len(drafts), 0] = 1.0
    return upload(ids, place), upload(probs, place)
