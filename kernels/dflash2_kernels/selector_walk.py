"""The candidate selector's walk (DFlash 2): one candidate per slot, each scored given the one chosen before.

    score_t(p → c) = unary[t, c] + Σ_r A[p, r] · w[t, r] · B[c, r]

The lattice holds every (predecessor candidate → candidate) score of a block, so the choice of every possible path is found in
a few batched operations and the walk itself only follows indices.
Shapes: n blocks, S slots, C candidates, r rank. Row 0's predecessor is the anchor, the same for all C rows.
"""

import torch


def selector_lattice_reference(
    unary: torch.Tensor, predecessors: torch.Tensor, hidden: torch.Tensor, successors: torch.Tensor
) -> torch.Tensor:
    """unary [n, S, C] fp32, predecessors [n, S, C, r] (codebook A rows of the slot before), hidden [n, S, r], successors
    [n, S, C, r] (codebook B rows) → scores [n, S, C (predecessor), C (candidate)] fp32."""
    gated = predecessors.float() * hidden.float()[:, :, None]
    return torch.matmul(gated, successors.float().transpose(-1, -2)) + unary[:, :, None]


def follow(choices: list[list[int]]) -> list[int]:
    """Indices along one path: choices[t][p] is the candidate chosen at slot t behind predecessor index p."""
    path, previous = [], 0
    for row in choices:
        previous = row[previous]
        path.append(previous)
    return path


def inverse_cdf(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """First index whose cumulated probability exceeds uniform × total: probs [..., C], uniforms [...] → int64 [...].

    Never an index of probability zero.
    """
    cumulated = probs.double().cumsum(-1)
    limit = uniforms.double() * cumulated[..., -1]
    index = (cumulated <= limit[..., None]).sum(-1)
    return torch.where(index < probs.shape[-1], index, probs.argmax(-1))
