"""Everything that shapes p, the target's distribution: temperature, then top_k, top_p and min_p, row by row.

Order and meaning are those of transformers' logits warpers. Ties at a boundary: the lower token id stays. A row's
arithmetic never depends on the other rows of the call. It must not know drafts or noise. Shapes: T rows, V vocabulary.
"""

from collections.abc import Sequence

import torch


def target_probs(
    logits: torch.Tensor,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> torch.Tensor:
    """p for every row: logits fp32 [T, V] and one option value per row → probabilities fp32 [T, V].

    temperature > 0 (greedy rows do not come here). top_k 0: off; else exactly min(top_k, V) tokens stay. top_p 1: off;
    else the smallest set of most likely tokens whose mass reaches it. min_p 0: off; else tokens under min_p times the
    largest probability go.
    """
    vocab_size = logits.shape[1]
    divisor = torch.tensor(temperature, dtype=torch.float32, device=logits.device)
    probs = torch.softmax(logits / divisor[:, None], dim=-1)
    for row in range(logits.shape[0]):
        k, p, floor = top_k[row], top_p[row], min_p[row]
        if 0 < k < vocab_size or p < 1.0:
            _keep_most_likely(probs[row], k if 0 < k < vocab_size else vocab_size, p)
        if floor > 0.0:
            one = probs[row]
            one.masked_fill_(one < floor * one.max(), 0.0)
            one.div_(one.sum())
    return probs


def _keep_most_likely(probs: torch.Tensor, k: int, p: float) -> None:
    """Zero all but the top k, then all but the smallest set of mass p of what is left, in place, and renormalise."""
    ordered, order = probs.sort(descending=True, stable=True)  # stable: lower ids first among equals
    ordered[k:] = 0.0
    ordered /= ordered.sum()
    if p < 1.0:
        before = ordered.cumsum(0) - ordered
        gone = before >= p
        gone[0] = False
        ordered.masked_fill_(gone, 0.0)
        ordered /= ordered.sum()
    probs[order] = ordered
