"""A decoder layer with fewer, larger operations: q/k/v as one product, gate/up as one, fused norms, rotary in three passes.

Driven by shapes: any pre-norm layer of the usual parts is fused; one with other parts, or one whose fused form does not
reproduce the untouched layer on a probe, stays as it is. It must not know model families.

Shapes: T rows, H hidden; N query heads, K KV heads of this rank; D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dflash2_kernels import row_passes
from dflash2_kernels.add_rms_norm import add_rms_norm, rms_norm
from dflash2_ray.models.attention import AttentionPlan, attend, store
from dflash2_ray.models.linear import PackedLinear, stacked
from dflash2_ray.models.rotary import Rotary
from dflash2_ray.models.tensor_parallel import Shard

_PARTS = {
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
}
_OPTIONAL_PARTS = {"self_attn.q_norm", "self_attn.k_norm"}


@dataclass(frozen=True)
class AttentionOptions:
    """What the untouched layer handed to its attention function."""

    scaling: float
    window: int | None


def can_fuse(layer: Any) -> bool:
    """Whether the layer has exactly the parts that `FusedLayer` knows."""
    owners = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
    return owners >= _PARTS and owners <= _PARTS | _OPTIONAL_PARTS and hasattr(layer.mlp, "act_fn")


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


class FusedLayer(nn.Module):
    """Built from an untouched layer's shapes and its weights (in their own dtype); runs in `activations` dtype."""

    def __init__(
        self,
        layer: Any,
        weights: Mapping[str, torch.Tensor],
        options: AttentionOptions,
        head_dim: int,
        activations: torch.dtype,
    ) -> None:
        super().__init__()
        self.options = options
        self.shard = Shard()  # set once the layer is proven; partial results are compared as they are
        self.head_dim = head_dim
        self.num_heads = weights["self_attn.q_proj.weight"].shape[0] // head_dim
        self.num_kv_heads = weights["self_attn.k_proj.weight"].shape[0] // head_dim
        self.qkv = PackedLinear(*stacked(weights, "self_attn", ("q_proj", "k_proj", "v_proj")))
        self.o_proj = PackedLinear(weights["self_attn.o_proj.weight"], weights.get("self_attn.o_proj.bias"))
        self.gate_up = PackedLinear(*stacked(weights, "mlp", ("gate_proj", "up_proj")))
        self.down_proj = PackedLinear(weights["mlp.down_proj.weight"], weights.get("mlp.down_proj.bias"))
        self.act_fn: Any = layer.mlp.act_fn
        probe = torch.linspace(-9, 9, 64)
        self._is_silu = torch.equal(self.act_fn(probe), F.silu(probe))
        self.input_norm = weights["input_layernorm.weight"].to(activations)
        self.post_norm = weights["post_attention_layernorm.weight"].to(activations)
        self.norm_eps = _eps(layer.input_layernorm)
        self.post_eps = _eps(layer.post_attention_layernorm)
        self.head_norm: torch.Tensor | None = None
        self.head_eps = 0.0
        if "self_attn.q_norm.weight" in weights:
            q_norm, k_norm = weights["self_attn.q_norm.weight"], weights["self_attn.k_norm.weight"]
            if q_norm.shape != (head_dim,) or k_norm.shape != (head_dim,):
                raise ValueError("norms over more than one head cannot be fused")
            rows = [q_norm.expand(self.num_heads, -1), k_norm.expand(self.num_kv_heads, -1)]
            self.head_norm = torch.cat(rows).to(activations).contiguous()
            self.head_eps = _eps(layer.self_attn.q_norm)

    def forward(self, x: torch.Tensor, rotary: Rotary, plan: AttentionPlan, cache: torch.Tensor) -> torch.Tensor:
        """x [P, H] → [P, H]; the first T rows are the plan's, others only pad the products. Stores keys and values."""
        qkv = self.qkv(rms_norm(x, self.input_norm, self.norm_eps)).view(x.shape[0], -1, self.head_dim)
        query = self._rotate_and_store(qkv, rotary, plan, cache)
        attended = attend(plan, query, cache, self.options.scaling, self.options.window)
        normed, x = add_rms_norm(self.shard.total(self.o_proj(attended)), x, self.post_norm, self.post_eps)
        return x + self.shard.total(self.down_proj(self._gated(self.gate_up(normed, native=True))))

    def _rotate_and_store(
        self, qkv: torch.Tensor, rotary: Rotary, plan: AttentionPlan, cache: torch.Tensor
    ) -> torch.Tensor:
        """qkv [P, N + 2·K, D] → rotated queries [P, N, D]; keys and values are in the cache."""
        if plan.rows is not None:
            return row_passes.rotate_and_store(
                qkv, self.head_norm, self.head_eps, rotary.cos, rotary.signed_sin, plan.slots, cache
            )
        heads, kv_heads = self.num_heads, self.num_kv_heads
        both = heads + kv_heads
        qk = qkv[:, :both]
        if self.head_norm is not None:
            qk = rms_norm(qk, None, self.head_eps) * self.head_norm
        rotated = rotary.rotate(qk)
        qkv[:, heads:both] = rotated[:, heads:]
        kv = qkv[: plan.slots.shape[0], heads:]
        store(plan, cache, kv.unflatten(1, (2, kv_heads)))
        return rotated[:, :heads]

    def _gated(self, both: torch.Tensor) -> torch.Tensor:
        if self._is_silu and both.dtype == torch.float32 and both.device.type == "cpu" and row_passes.available():
            return row_passes.silu_gate(both)
        gate, up = both.chunk(2, dim=-1)
        gated: torch.Tensor = self.act_fn(gate) * up
        return gated
