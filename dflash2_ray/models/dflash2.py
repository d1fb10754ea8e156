"""The drafter: `DFlash2DraftModel` and `DFlashDraftModel`.

One pass over a block [anchor, mask, mask, …] that attends to the target's context rows predicts every masked position at once;
DFlash 2 adds a grouped dynamic convolution around each sub-layer and a candidate selector that walks the slots. Source of the
semantics: the official `dflash` 0.1.0 package (`dflash/model.py`). It must not know requests, messages or noise sources.

Shapes: R requests, S speculative tokens, B = S + 1 block rows, H hidden, N heads, K KV heads, D head size, C candidates,
V vocabulary, L layers.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from dflash2_kernels import selector_walk
from dflash2_kernels.add_rms_norm import add_rms_norm, rms_norm
from dflash2_kernels.context_ingest import store_context
from dflash2_kernels.grouped_conv import grouped_conv
from dflash2_kernels.kv_store import kv_store
from dflash2_kernels.paged_attention import paged_attention
from dflash2_kernels.selector_walk import DRAW, GREEDY, RACE, realised_rows, selector_lattice, walk_lattice
from dflash2_kernels.vocab_topk import vocab_topk
from dflash2_ray.errors import CheckpointError
from dflash2_ray.models.context_pages import ContextPages
from dflash2_ray.models.draft_context import DraftContext
from dflash2_ray.models.drafter_checkpoint import read_projection, read_tensors, validate_drafter
from dflash2_ray.models.drafter_config import DrafterConfig, LayerAttention
from dflash2_ray.models.linear import PackedLinear, compute_dtype, stacked
from dflash2_ray.models.paged_plan import Launch
from dflash2_ray.models.rotary import PlainRotary, Rotary, RotaryTables
from dflash2_ray.models.target_share import TargetShare
from dflash2_ray.models.tensor_files import TensorFiles

logger = logging.getLogger(__name__)
GREEDY_BELOW = 1e-5
DFLASH1_CANDIDATES = 128  # tokens that a sampled DFlash 1 slot keeps: its q is the softmax over them


@dataclass(frozen=True)
class Draft:
    """token_ids[r]: S ids. candidate_ids [R, S, C] int64 and candidate_probs [R, S, C] fp32: the rows that the ids of
    requests drawn by `uniforms` were drawn from; None when there are none."""

    token_ids: list[list[int]]
    candidate_ids: torch.Tensor | None
    candidate_probs: torch.Tensor | None


def draw_rules(temperatures: Sequence[float], matching: Sequence[bool]) -> list[int]:
    """How each request draws (`selector_walk`): GREEDY below 1e-5, else by the RACE that its target runs too, or DRAW, from a q of its own."""
    return [
        GREEDY if temperature < GREEDY_BELOW else RACE if own else DRAW
        for temperature, own in zip(temperatures, matching, strict=True)
    ]


class _GroupedConv(nn.Module):
    """The dynamic convolution before (`prepare`) and behind (`finish`) one sub-layer; both kernels come from its input."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str, group_size: int) -> None:
        super().__init__()
        self.base_kernel = tensors[f"{prefix}.base_kernel"]
        self.kernel_projection = PackedLinear(tensors[f"{prefix}.kernel_projection.weight"])
        self.group_size = group_size

    def prepare(self, u: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        taps, groups = self.base_kernel.shape[1], u.shape[1] // self.group_size
        dynamic = self.kernel_projection(u).view(-1, width, 2, taps, groups)
        y = grouped_conv(u.view(-1, width, u.shape[1]), dynamic[:, :, 0], self.base_kernel[0])
        return y.view_as(u), dynamic[:, :, 1]

    def finish(self, s: torch.Tensor, dynamic: torch.Tensor) -> torch.Tensor:
        y = grouped_conv(s.view(dynamic.shape[0], dynamic.shape[1], -1), dynamic, self.base_kernel[1])
        return y.view_as(s)


class _DraftLayer(nn.Module):
    """One Qwen3-shaped layer over block rows [R * B, H]."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], index: int, config: DrafterConfig, dtype: torch.dtype
    ) -> None:
        super().__init__()
        prefix = f"layers.{index}"
        self.config, self.index, self.attention = config, index, config.attention[index]
        attention = f"{prefix}.self_attn"
        self.qkv = PackedLinear(*stacked(tensors, attention, ("q_proj", "k_proj", "v_proj")))
        self.o_proj = PackedLinear(tensors[f"{attention}.o_proj.weight"], tensors.get(f"{attention}.o_proj.bias"))
        self.gate_up = PackedLinear(*stacked(tensors, f"{prefix}.mlp", ("gate_proj", "up_proj")))
        self.down_proj = PackedLinear(tensors[f"{prefix}.mlp.down_proj.weight"])
        self.input_norm = tensors[f"{prefix}.input_layernorm.weight"].to(dtype)
        self.post_norm = tensors[f"{prefix}.post_attention_layernorm.weight"].to(dtype)
        q_norm, k_norm = tensors[f"{attention}.q_norm.weight"], tensors[f"{attention}.k_norm.weight"]
        rows = [q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)]
        self.head_norm = torch.cat(rows).to(dtype).contiguous()
        self.sinks = tensors.get(f"{attention}.attention_sink_bias")
        self.attention_conv = self.mlp_conv = None
        if config.is_dflash2:
            self.attention_conv = _GroupedConv(tensors, f"{prefix}.attention_conv", config.conv_group_size)
            self.mlp_conv = _GroupedConv(tensors, f"{prefix}.mlp_conv", config.conv_group_size)

    def forward(self, x: torch.Tensor, width: int, rotary: Rotary, blocks: "_Blocks") -> torch.Tensor:
        config = self.config
        eps = config.rms_norm_eps
        u = rms_norm(x, self.input_norm, eps)
        if self.attention_conv is None:
            a = self.o_proj(self._attend(u, rotary, blocks))
        else:
            u, kernel = self.attention_conv.prepare(u, width)
            a = self.attention_conv.finish(self.o_proj(self._attend(u, rotary, blocks)), kernel)
        m, x = add_rms_norm(a, x, self.post_norm, eps)
        if self.mlp_conv is None:
            return x + self._mlp(m)
        m, kernel = self.mlp_conv.prepare(m, width)
        return x + self.mlp_conv.finish(self._mlp(m), kernel)

    def _mlp(self, m: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(m).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)

    def _attend(self, u: torch.Tensor, rotary: Rotary, blocks: "_Blocks") -> torch.Tensor:
        config = self.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        both = heads + kv_heads
        qkv = self.qkv(u).view(u.shape[0], -1, head_dim)
        qk = rotary.rotate(rms_norm(qkv[:, :both], None, config.rms_norm_eps) * self.head_norm)
        block = torch.stack([qk[:, heads:], qkv[:, both:] * config.value_scale], dim=1)  # [R * B, 2, K, D]
        return blocks.attend(self, qk[:, :heads], block)

    def softmax(self, scores: torch.Tensor, groups: int, width: int) -> torch.Tensor:
        """Row-wise softmax [K, G * B, n]; a sink is one more column that takes weight and gives nothing."""
        if self.sinks is None:
            return torch.softmax(scores, dim=-1)
        sinks = self.sinks.float().view(-1, groups, 1).expand(-1, groups, width).reshape(*scores.shape[:2], 1)
        return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


class _Blocks(Protocol):
    """The blocks of one pass, and what they attend to."""

    def attend(self, layer: _DraftLayer, query: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """query [R * B, N, D], rotated, and the rows' own keys and values [R * B, 2, K, D] in one layer → [R * B, N * D]."""
        ...


class PagedBlocks:
    """Contexts in pages, for kernels. slots [R * B] int64: where the block's own rows are stored, as scratch."""

    def __init__(self, pages: ContextPages, slots: torch.Tensor, launch: Launch) -> None:
        self._pages, self._slots, self._launch = pages, slots, launch

    def attend(self, layer: _DraftLayer, query: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        cache, one = self._pages.rows[:, layer.index], self._launch
        kv_store(block, self._slots, cache)
        return paged_attention(
            query, cache, one.page_table, one.row_starts, one.num_rows, one.kv_lens, self._pages.page_size, query.shape[-1] ** -0.5,
            max_num_rows=one.max_num_rows, max_kv_len=one.max_kv_len, causal=layer.attention.causal, window=layer.attention.window,
            sinks=layer.sinks,
        ).flatten(1)  # fmt: skip


class _BufferedBlocks:
    """One buffer per request; rows: B."""

    def __init__(self, contexts: Sequence[DraftContext], rows: int, device: str) -> None:
        self._contexts, self._rows = contexts, rows
        self._biases = _Biases(rows, device)
        for context in contexts:
            context.reserve_block(rows)

    def attend(self, layer: _DraftLayer, query: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        rows, head_dim, kv_heads = self._rows, query.shape[2], block.shape[2]
        groups = query.shape[1] // kv_heads
        query = query * head_dim**-0.5
        outputs = []
        for r, context in enumerate(self._contexts):
            own = slice(r * rows, (r + 1) * rows)
            context.write_block(layer.index, block[own])
            keys, values, first = context.view(layer.index, rows)
            folded = (
                query[own].view(rows, kv_heads, groups, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
            )
            scores = torch.bmm(folded, keys.permute(1, 2, 0)).float()
            bias = self._biases.get(layer.attention, context.num_committed, first, keys.shape[0])
            if bias is not None:
                scores = scores.view(kv_heads, groups, rows, -1).add_(bias).view_as(scores)
            out = torch.bmm(layer.softmax(scores, groups, rows).to(values.dtype), values.transpose(0, 1))
            outputs.append(out.view(kv_heads, groups, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, -1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _Biases:
    """Score biases of one pass, by kind of layer and position: None where every block row sees every key."""

    def __init__(self, width: int, device: str) -> None:
        self._width, self._device = width, device
        self._known: dict[tuple[LayerAttention, int, int], torch.Tensor | None] = {}

    def get(self, attention: LayerAttention, start: int, first: int, num_keys: int) -> torch.Tensor | None:
        """[B, num_keys] for a block at position `start` over keys from position `first` on."""
        key = (attention, start, first)
        if key not in self._known:
            self._known[key] = self._build(attention, start, first, num_keys)
        return self._known[key]

    def _build(self, attention: LayerAttention, start: int, first: int, num_keys: int) -> torch.Tensor | None:
        window = attention.window
        reaches_back = window is not None and start + self._width - first > window
        if not attention.causal and not reaches_back and (window is None or self._width <= window):
            return None
        i = torch.arange(start, start + self._width, device=self._device)[:, None]
        j = torch.arange(first, first + num_keys, device=self._device)[None, :]
        hidden = torch.zeros(self._width, num_keys, dtype=torch.bool, device=self._device)
        if attention.causal:
            hidden |= j > i
        if window is not None:
            hidden |= (i - j >= window) | (j - i >= window)
        return torch.zeros(hidden.shape, device=self._device).masked_fill_(hidden, float("-inf"))


class _CandidateSelector(nn.Module):
    """The two codebooks and the hidden projection."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.predecessor_codebook = tensors["candidate_selector.predecessor_codebook"]
        self.successor_codebook = tensors["candidate_selector.successor_codebook"]
        self.hidden_projection = PackedLinear(tensors["candidate_selector.hidden_projection.weight"])

    def lattice(
        self, hidden: torch.Tensor, unary: torch.Tensor, candidates: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """hidden [R, S, H], unary and candidates [R, S, C], anchors [R] → scores [R, S, C (predecessor), C]."""
        projected = self.project(hidden)
        return selector_lattice(
            unary, candidates, projected, self.predecessor_codebook, self.successor_codebook, anchors
        )

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, S, H] → [R, S, r]."""
        return self.hidden_projection(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:2], -1)


class Drafter:
    """Build with `load_drafter`. Holds no request; contexts are handed in."""

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, torch.Tensor],
        share: TargetShare,
        rotary: RotaryTables,
        mask_embedding: torch.Tensor | None,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.config = config
        self.device = device
        self.activations = dtype
        self.layers = [_DraftLayer(tensors, index, config, dtype) for index in range(config.num_layers)]
        self.hidden_norm = tensors["hidden_norm.weight"].to(dtype)
        self.norm = tensors["norm.weight"].to(dtype)
        self.candidate_selector = _CandidateSelector(tensors) if config.is_dflash2 else None
        self._context_kv = _context_projection(tensors, config)
        self._context_norms = torch.stack(
            [
                tensors[f"layers.{i}.self_attn.k_norm.weight"].expand(config.num_kv_heads, -1)
                for i in range(config.num_layers)
            ]
        ).to(dtype)
        self._rotary = rotary
        self._mask_embedding = mask_embedding
        self._embedding = _own_or_shared(tensors, "embed_tokens.weight", share.embedding, share.vocab_size)
        self.owns_head, self._head = _head(config, tensors, share)
        self._target_ids = _target_ids(config, tensors, share.vocab_size)
        self.num_candidates = config.selector_top_k or min(
            DFLASH1_CANDIDATES, share.vocab_size, config.draft_vocab_size
        )

    # ---- context ------------------------------------------------------------------------------------------------

    def new_context(self, first_position: int = 0) -> DraftContext:
        """An empty context for one request, whose first row will be that of `first_position` (above 0 only where every layer has a
        window that reaches no further back)."""
        windows = [layer.window for layer in self.config.attention]
        like = torch.empty(0, dtype=self.activations, device=self.device)
        return DraftContext(windows, self.config.num_kv_heads, self.config.head_dim, like, first_position)

    def new_pages(self, num_pages: int, page_size: int) -> ContextPages:
        """Empty pages for the contexts of all requests."""
        config = self.config
        return ContextPages(
            num_pages, page_size, config.num_layers, config.num_kv_heads, config.head_dim, self.activations, self.device
        )

    @torch.inference_mode()
    def context_kv(self, rows: torch.Tensor, positions: torch.Tensor, num_positions: int) -> torch.Tensor:
        """Context rows [n, H] (before `hidden_norm`) at positions [n], all below num_positions → [n, L, 2, K, D]."""
        config = self.config
        context = rms_norm(rows.to(self.activations), self.hidden_norm, config.rms_norm_eps)
        kv = self._context_kv(context).view(rows.shape[0], config.num_layers, 2, config.num_kv_heads, config.head_dim)
        keys = rms_norm(kv[:, :, 0], None, config.rms_norm_eps) * self._context_norms
        rotary = Rotary.from_tables(*self._rotary.rows(positions, num_positions))
        flat = keys.reshape(rows.shape[0], config.num_layers * config.num_kv_heads, config.head_dim)
        keys = rotary.rotate(flat).view_as(keys)
        return torch.stack([keys, kv[:, :, 1] * config.value_scale], dim=2)

    @torch.inference_mode()
    def ingest(
        self, rows: torch.Tensor, positions: torch.Tensor, num_positions: int, slots: torch.Tensor, pages: torch.Tensor
    ) -> None:
        """The same into pages [slots, L, 2, K, D], by kernels; slots [n] int64, -1 for rows that stand for nobody."""
        config = self.config
        context = rms_norm(rows.to(self.activations), self.hidden_norm, config.rms_norm_eps)
        kv = self._context_kv(context).view(rows.shape[0], *pages.shape[1:])
        cos, sin = self._rotary.rows(positions, num_positions)
        norms = self._context_norms[:, 0]
        store_context(kv, norms, cos, sin, slots, pages, eps=config.rms_norm_eps, value_scale=config.value_scale)

    # ---- drafting -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def block_hidden(self, anchors: Sequence[int], contexts: Sequence[DraftContext], width: int) -> torch.Tensor:
        """Hidden states behind the final norm of rows 1 … width: [R, S = width, H]."""
        rows = width + 1
        ids = torch.full((len(anchors), rows), self.config.mask_token_id, dtype=torch.int64)
        ids[:, 0] = torch.tensor(list(anchors))
        ids = ids.to(self.device)
        starts = torch.tensor([context.num_committed for context in contexts])
        positions = (starts[:, None] + torch.arange(rows)).reshape(-1).to(self.device)
        num_positions = max(context.num_committed for context in contexts) + rows
        return self.run_block(ids, positions, num_positions, _BufferedBlocks(contexts, rows, self.device))

    @torch.inference_mode()
    def run_block(
        self, ids: torch.Tensor, positions: torch.Tensor, num_positions: int, blocks: _Blocks
    ) -> torch.Tensor:
        """ids [R, B], positions [R * B] below num_positions → hidden states behind the final norm of rows 1 … B - 1: [R, S, H]."""
        config, rows = self.config, ids.shape[1]
        x = F.embedding(ids, self._embedding).to(self.activations)
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        if self._mask_embedding is not None:
            x[:, 1:] = self._mask_embedding
        x = x.view(-1, x.shape[-1])
        rotary = Rotary.from_tables(*self._rotary.rows(positions, num_positions))
        for layer in self.layers:
            x = layer(x, rows, rotary, blocks)
        x = rms_norm(x, self.norm, config.rms_norm_eps)
        return x.view(ids.shape[0], rows, -1)[:, 1:]

    @torch.inference_mode()
    def candidates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [R, S, H] → (logits [R, S, C] fp32 behind multiplier and soft-cap, target token ids [R, S, C], ascending,
        so that the lower id wins a tie)."""
        logits = self._head(hidden.reshape(-1, hidden.shape[-1]))
        ids = vocab_topk(logits, self.num_candidates)[1].sort(dim=-1).values
        unary = logits.gather(-1, ids) * self.config.output_multiplier
        if self.config.softcap is not None:
            unary = torch.tanh(unary / self.config.softcap) * self.config.softcap
        if self._target_ids is not None:
            ids = self._target_ids[ids]
        shape = (*hidden.shape[:2], self.num_candidates)
        return unary.view(shape), ids.view(shape)

    @torch.inference_mode()
    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[DraftContext],
        width: int,
        temperatures: Sequence[float],
        uniforms: torch.Tensor | None = None,
        matching: Sequence[bool] | None = None,
        token_noise: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Draft:
        """Draft `width` tokens for each request. Greedy requests (temperature < 1e-5) take the best candidate.

        uniforms [R, S] fp32 in [0, 1): sampled requests draw from q by inverse CDF. matching[r] (default: none): request r
        draws by the race that its target runs too, argmax q / E over the candidates, which is argmax of score / temperature
        + Gumbel noise; token_noise gives their E, fp64 [M, S, C], for the candidate ids [M, S, C] of the M requests that
        match, in order.
        """
        hidden = self.block_hidden(anchors, contexts, width)
        rules = draw_rules(temperatures, matching or [False] * len(anchors))
        divisor = torch.tensor([max(t, GREEDY_BELOW) for t in temperatures], dtype=torch.float32, device=self.device)
        unary, ids = self.candidates(hidden)
        if self.candidate_selector is not None:
            scores = self.candidate_selector.lattice(
                hidden, unary, ids, torch.tensor(list(anchors), device=self.device)
            )
        else:
            scores = unary[:, :, None]  # every slot for itself: one row, whatever came before
        exponentials = None
        if RACE in rules:
            assert token_noise is not None, "matching requests need noise of their candidates"
            exponentials = token_noise(
                ids[torch.tensor([r for r, rule in enumerate(rules) if rule == RACE], device=self.device)]
            )
        path, probs = walk_lattice(
            scores, divisor, rules, None if uniforms is None else uniforms.to(self.device), exponentials
        )
        tokens = ids.gather(-1, path[:, :, None])[:, :, 0].tolist()
        if probs is None or DRAW not in rules:
            return Draft(tokens, None, None)
        return Draft(tokens, ids, realised_rows(probs, path))

    @torch.inference_mode()
    def walk(
        self,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        temperatures: torch.Tensor,
        rules: torch.Tensor,
        seeds: torch.Tensor,
        bases: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Head and walk, by kernels: hidden [R, S, H], the rest [R] as `selector_walk` wants it → (tokens [R, S], candidate ids and
        their realised q [R, S, C])."""
        selector = self.candidate_selector
        unary, ids = self.candidates(hidden)
        tokens, probs = selector_walk.selector_walk(
            unary, ids,
            None if selector is None else selector.project(hidden),
            None if selector is None else selector.predecessor_codebook,
            None if selector is None else selector.successor_codebook,
            anchors, temperatures, rules, seeds, bases,
        )  # fmt: skip
        return tokens, ids, probs


def load_drafter(folder: Path, config: DrafterConfig, share: TargetShare, *, dtype: str, device: str) -> Drafter:
    """Load and validate against the target. Raises CheckpointError."""
    files = TensorFiles(folder)
    validate_drafter(
        config,
        files,
        target_hidden_size=share.hidden_size,
        target_num_layers=share.num_layers,
        target_vocab_size=share.vocab_size,
        target_embedding_rows=share.embedding.shape[0],
    )
    tensors = read_tensors(files, getattr(torch, dtype), device)
    if not config.rotates_halves:
        _reorder_pairs(tensors, config)
    activations = compute_dtype(dtype, device)
    rotary = RotaryTables(_rotary_module(config), config.max_position_embeddings, activations, device)
    mask = _mask_embedding(Path(folder), config, activations, device)
    return Drafter(config, tensors, share, rotary, mask, activations, device)


def load_context_projection(folder: Path, config: DrafterConfig, dtype: str, device: str) -> nn.Module:
    """The drafter's `fc`, which runs with the target: tapped features [n, F * H_target] → context rows [n, H]."""
    return PackedLinear(read_projection(folder, getattr(torch, dtype), device))


def _rotary_module(config: DrafterConfig) -> PlainRotary:
    try:
        if config.rope["rope_type"] == "default":
            return PlainRotary.of_base(config.rope["rope_theta"], config.head_dim)
        from transformers import Qwen3Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # scaled frequencies are that library's

        shape = Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope),
        )
        return PlainRotary(*ROPE_INIT_FUNCTIONS[config.rope["rope_type"]](shape))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"drafter: rope parameters {config.rope}: not usable: {error!r}") from None


def _context_projection(tensors: Mapping[str, torch.Tensor], config: DrafterConfig) -> PackedLinear:
    """k_proj and v_proj of every layer as one product."""
    weights, biases = [], []
    for index in range(config.num_layers):
        weight, bias = stacked(tensors, f"layers.{index}.self_attn", ("k_proj", "v_proj"))
        weights.append(weight)
        biases.append(bias)
    return PackedLinear(torch.cat(weights), None if biases[0] is None else torch.cat(biases))  # type: ignore[arg-type]


def _reorder_pairs(tensors: dict[str, torch.Tensor], config: DrafterConfig) -> None:
    """Bring a drafter that rotates neighbouring pairs to the half-split layout: the same permutation inside every head of
    queries and keys leaves every score as it was."""
    dim = config.head_dim
    order = torch.cat([torch.arange(0, dim, 2), torch.arange(1, dim, 2)])
    for name, value in tensors.items():
        if any(part in name for part in ("q_proj", "k_proj")):
            tensors[name] = value.view(-1, dim, *value.shape[1:])[:, order].reshape(value.shape).contiguous()
        elif any(part in name for part in ("q_norm", "k_norm")):
            tensors[name] = value[order].contiguous()


def _mask_embedding(folder: Path, config: DrafterConfig, dtype: torch.dtype, device: str) -> torch.Tensor | None:
    """`mask_embedding.pt`, which replaces the embedding of masked rows. Raises CheckpointError."""
    path = folder / "mask_embedding.pt"
    if not path.is_file():
        return None
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise CheckpointError(f"{path}: not readable: {error}") from None
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path}: expected a dictionary with `embedding`, got {type(stored).__name__}")
    if stored.get("per_position") is not None:
        raise CheckpointError(f"{path}: per_position embeddings are not offered")
    if stored.get("mask_token_id", config.mask_token_id) != config.mask_token_id:
        raise CheckpointError(f"{path}: mask_token_id: expected {config.mask_token_id}, got {stored['mask_token_id']}")
    row = stored.get("embedding")
    if not isinstance(row, torch.Tensor) or row.numel() != config.hidden_size:
        raise CheckpointError(
            f"{path}: embedding: expected {config.hidden_size} values, got {getattr(row, 'shape', row)}"
        )
    return row.reshape(-1).to(device, dtype)


def _own_or_shared(tensors: Mapping[str, torch.Tensor], name: str, shared: torch.Tensor, num_rows: int) -> torch.Tensor:
    own = tensors.get(name)
    if own is None or torch.equal(own[:num_rows].float(), shared[:num_rows].float()):
        return shared
    logger.info("the drafter keeps its own %s (it differs from the target's)", name)
    return own


def _head(config: DrafterConfig, tensors: Mapping[str, torch.Tensor], share: TargetShare):  # type: ignore[no-untyped-def]
    """(whether the drafter's own head is used, head: [n, H] → fp32 logits)."""
    own = tensors.get("lm_head.weight")
    if own is None:
        logger.info("the drafter shares the target's head")
        return False, share.head
    mapped = config.draft_vocab_size != config.vocab_size
    rows = config.draft_vocab_size if mapped else share.vocab_size
    if (
        not mapped
        and share.head_weight is not None
        and torch.equal(own[:rows].float(), share.head_weight[:rows].float())
    ):
        logger.info("the drafter's head equals the target's and is shared")
        return False, share.head
    logger.info("the drafter keeps its own head")
    packed = PackedLinear(own[:rows].contiguous())
    return True, lambda hidden: packed(hidden).float()


def _target_ids(config: DrafterConfig, tensors: Mapping[str, torch.Tensor], vocab_size: int) -> torch.Tensor | None:
    """Draft id → target id of a pruned vocabulary (`d2t` holds the differences)."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    ids = torch.arange(config.draft_vocab_size, device=tensors["d2t"].device) + tensors["d2t"].to(torch.int64)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise CheckpointError(
            f"drafter: tensor d2t: expected ids of the target vocabulary of {vocab_size}, got ids {low} to {high}"
        )
    return ids
