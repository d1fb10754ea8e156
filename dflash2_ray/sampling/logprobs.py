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
        found += [(own, _best(row, num_alternatives)) for own, row in zip(picked, rows, strict=True)]
    return found


def _best(row: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    least = row.topk(min(count, row.shape[0])).values[-1]
    ids = (row >= least).nonzero()[:, 0].tolist()  # more than asked for where the last ones are equal
    pairs = sorted(zip(ids, row[ids].tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(pairs[:count])
