"""Log-probabilities of given tokens and of the most likely ones, of the target's own distribution: before any option.

A row's numbers do not depend on the other rows. It must not know requests. Shapes: n rows, V vocabulary.
"""

from collections.abc import Sequence

import torch

_ROWS_AT_ONCE = 64  # a long prompt must not double the memory of its logits


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_alternatives: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """For each row of logits [n, V] fp32: (log-probability of its token, the `num_alternatives` most likely (id, log-probability)
    pairs, best first; the lower id first among equals)."""
    found: list[tuple[float, tuple[tuple[int, float], ...]]] = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        rows = torch.log_softmax(logits[start : start + _ROWS_AT_ONCE].float(), dim=-1)
        own_ids = token_ids[start : start + _ROWS_AT_ONCE]
        picked = rows.gather(1, torch.tensor(own_ids, device=rows.device)[:, None])[:, 0].tolist()
        found += zip(picked, _best(rows, num_alternatives), strict=True)
    return found


def _best(rows: torch.Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The alternatives of every row; one more is looked at, to see whether the last one has equals outside."""
    if count == 0:
        return [()] * rows.shape[0]
    top = rows.topk(min(count + 1, rows.shape[1]))
    best = []
    for row, ids, values in zip(rows, top.indices.tolist(), top.values.tolist(), strict=True):
        if len(values) > count and values[count] == values[count - 1]:  # which of the equals topk took is not defined
            ids = (row >= values[count]).nonzero()[:, 0].tolist()
            values = row[ids].tolist()
        pairs = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        best.append(tuple(pairs[:count]))
    return best
