"""The target: a dense transformers causal model over a paged KV cache, with taps for the drafter.

The module tree is built without memory and filled layer by layer from safetensors; each layer is then fused where its fused
form is proven equal on a probe (`fused_layer`). `fast=False` keeps transformers' own modules: the oracle in tests.
It must not know requests, drafts or ray.

Shapes: T rows of the flat batch, H hidden, V vocabulary, F tapped layers.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash2_ray.config import TargetFacts
from dflash2_ray.errors import CheckpointError
from dflash2_ray.models.attention import TILE, AttentionPlan, KVCache, attend, plan_attention, runs_by_row, store
from dflash2_ray.models.attention_batch import AttentionBatch, Span
from dflash2_ray.models.fused_layer import AttentionOptions, FusedLayer, can_fuse
from dflash2_ray.models.linear import PackedLinear, compute_dtype, fast_rows
from dflash2_ray.models.rotary import Rotary, RotaryTables
from dflash2_ray.models.source import load_target_config, read_target_facts
from dflash2_ray.models.target_share import TargetShare
from dflash2_ray.models.tensor_files import TensorFiles
from dflash2_ray.models.tensor_parallel import LayerPlan, Shard, assign, embed

logger = logging.getLogger(__name__)
ATTENTION = "paged_by_request"  # transformers takes a name with "flash" in it for one of its own
_PROBE_ROWS = 5
Progress = Callable[[float, float], None]  # done, total


class PagedContext:
    """What the registered attention function needs of one pass: plan and cache, and what each layer asked of it."""

    def __init__(self, plan: AttentionPlan, cache: KVCache, options: dict[int, AttentionOptions]) -> None:
        self.plan = plan
        self.cache = cache
        self.options = options


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: PagedContext | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, N, T, D], key and value [1, K, T, D] → [1, T, N, D]."""
    if paged is None:
        raise CheckpointError(
            "target: this model does not hand its options to the attention function; it cannot be served"
        )
    if softcap is not None or s_aux is not None:
        raise CheckpointError("target: attention with soft-capped scores or sinks is not offered")
    layer = module.layer_idx
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    paged.options[layer] = AttentionOptions(scaling, sliding_window)
    cache = paged.cache.layers[layer]
    store(paged.plan, cache, torch.stack([key[0].transpose(0, 1), value[0].transpose(0, 1)], dim=1))
    rows = query[0].transpose(0, 1).contiguous()
    out = attend(paged.plan, rows, cache, scaling, sliding_window)
    return out.view(1, *rows.shape), None


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, paged_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


class Target:
    """See the module. Build with `load`."""

    def __init__(
        self,
        facts: TargetFacts,
        model: Any,
        base: Any,
        rotary: RotaryTables,
        taps: Sequence[int],
        device: str,
        dtype: torch.dtype,
        shard: Shard,
    ) -> None:
        self.facts = facts
        self.shard = shard
        self.num_heads = facts.num_heads // shard.size  # of this rank, as all that it holds
        self.num_kv_heads = max(1, facts.num_kv_heads // shard.size)
        self.taps = tuple(taps)
        self.device = device
        self.activations = dtype
        self.by_row = runs_by_row(torch.device(device), facts.head_dim)
        self.embedding = torch.empty(0)
        self.head_weight = torch.empty(0)
        self._model = model
        self._base = base
        self._layers: list[nn.Module] = list(base.layers)
        self._dtype = "float32"
        self._tolerance = 1e-4  # how far a fused form may be from the untouched one, relative to the largest value
        self._options: dict[int, AttentionOptions] = {}
        self._head: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden
        self._rotary = rotary

    # ---- loading ------------------------------------------------------------------------------------------------

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        folder: Path,
        *,
        dtype: str,
        device: str,
        taps: Sequence[int] = (),
        progress: Progress | None = None,
        fast: bool = True,
        shard: Shard | None = None,
    ) -> "Target":
        """Build one rank's part from a checkpoint folder, reading that part only. dtype: `float32` or `bfloat16`; taps:
        decoder layers whose output is kept for the drafter (0-based; -1: the embeddings). Raises CheckpointError."""
        from transformers import AutoModelForCausalLM

        _register()
        config = load_target_config(folder)
        facts = read_target_facts(folder)
        activations = compute_dtype(dtype, device)
        weights_dtype = getattr(torch, dtype)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=activations)
        model.eval()
        base = getattr(model, model.base_model_prefix)
        for tap in taps:
            if not -1 <= tap < facts.num_layers:
                raise CheckpointError(f"tap {tap}: target {facts.name!r} has layers 0 … {facts.num_layers - 1}")
        base.rotary_emb = type(base.rotary_emb)(config=config)
        rotary = RotaryTables(base.rotary_emb, facts.max_position_embeddings, activations, device)
        shard = shard or Shard()
        target = cls(facts, model, base, rotary, taps, device, activations, shard)
        target._dtype = dtype
        target._tolerance = 1e-4 if dtype == "float32" else 5e-2
        files = TensorFiles(folder)
        plan = LayerPlan(config.base_model_tp_plan, shard, facts.num_kv_heads, facts.head_dim)
        _check_names(folder, files, model, tied=bool(config.tie_word_embeddings))
        steps = facts.num_layers + 1
        target._load_ends(files, weights_dtype)
        _report(progress, 1, steps)
        for index in range(facts.num_layers):
            target._load_layer(index, files, weights_dtype, fast, plan)
            if index == 0:
                target._check_ends()
            _report(progress, index + 2, steps)
        target._agree()
        for index, kept in enumerate(target._layers):
            if isinstance(kept, FusedLayer):
                kept.shard = shard
            elif shard.size > 1:
                _sum_outputs(kept, plan, shard, index)
        return target

    def _agree(self) -> None:
        """Every rank must have fused the same layers: fused and untouched ones pad their passes differently. Raises
        CheckpointError, on every rank."""
        fused = self.shard.exchange([isinstance(layer, FusedLayer) for layer in self._layers])
        if any(row != fused[0] for row in fused):
            raise CheckpointError(
                f"target {self.facts.name!r}: ranks fused different layers ({[sum(row) for row in fused]} of "
                f"{len(self._layers)}); expected the same hardware and libraries for all"
            )

    def _load_ends(self, files: TensorFiles, dtype: torch.dtype) -> None:
        """Embedding, final norm and head."""
        prefix = self._model.base_model_prefix
        rows, hidden = self.facts.vocab_size, self.facts.hidden_size
        own = self.shard.vocabulary(rows)
        self.embedding = ends_tensor(files, f"{prefix}.embed_tokens.weight", rows, hidden, own).to(self.device, dtype)
        self.head_weight = self.embedding
        if not self._model.config.tie_word_embeddings:
            self.head_weight = ends_tensor(files, "lm_head.weight", rows, hidden, own).to(self.device, dtype)
        if self.head_weight.shape[0] > 0:
            packed = PackedLinear(self.head_weight)
            self._head = lambda hidden: packed(hidden).float()
        else:
            self._head = lambda hidden: hidden.new_zeros(hidden.shape[0], 0, dtype=torch.float32)
        norm = {
            key: files.read(f"{prefix}.norm.{key}", tuple(value.shape)).to(self.device, self.activations)
            for key, value in self._base.norm.state_dict().items()
        }
        self._base.norm.load_state_dict(norm, assign=True)

    def _load_layer(self, index: int, files: TensorFiles, dtype: torch.dtype, fast: bool, plan: LayerPlan) -> None:
        layer = self._base.layers[index]
        prefix = f"{self._model.base_model_prefix}.layers.{index}"
        weights = {}
        for key, whole in layer.state_dict().items():
            shape = tuple(whole.shape)
            part = plan.part(key, shape)
            value = files.read(f"{prefix}.{key}", shape, rows=part.rows, columns=part.columns)
            weights[key] = (torch.zeros_like(value) if part.zero else value).to(self.device, dtype)
        assign(layer, {key: value.to(self.activations) for key, value in weights.items()})
        probe = _Probe(self, layer, index)
        try:
            expected = probe.untouched()
        except RuntimeError as error:
            raise self._unusual(f"layer {index} cannot be run as this engine runs layers ({error})") from None
        self._options[index] = probe.options
        if not fast:
            return
        fused = self._fuse(layer, index, weights, probe, expected)
        if fused is not None:
            self._layers[index] = fused
            if index > 0:  # layer 0 is needed once more, by `_check_ends`
                self._base.layers[index] = nn.Identity()
        else:
            _pack_linears(layer, weights)

    def _fuse(
        self, layer: nn.Module, index: int, weights: Mapping[str, torch.Tensor], probe: "_Probe", expected: torch.Tensor
    ) -> FusedLayer | None:
        """The fused layer if it reproduces the untouched one on the probe, else None."""
        if not can_fuse(layer):
            logger.info("layer %d has unusual parts; it runs as transformers wrote it", index)
            return None
        try:
            fused = FusedLayer(layer, weights, probe.options, self.facts.head_dim, self.activations)
            got = probe.fused(fused)
        except (RuntimeError, ValueError) as error:
            logger.info("layer %d cannot be fused: %s", index, error)
            return None
        if (got - expected).abs().max() > self._tolerance * (1 + expected.abs().max()):
            logger.info("layer %d differs when fused; it runs as transformers wrote it", index)
            return None
        return fused

    def _check_ends(self) -> None:
        """Whether everything around the layers is plain: the whole untouched model, cut to its first layer, must give the
        same logits as embedding, layer, norm and head do here. Catches scaled embeddings, soft-capped logits and such."""
        model, base, layers = self._model, self._base, self._base.layers
        if self.embedding.shape[0] == 0:
            return  # a rank without any token id; the others look
        ids = torch.arange(_PROBE_ROWS, device=self.device) % self.embedding.shape[0]
        rows = torch.arange(_PROBE_ROWS, device=self.device)
        batch = AttentionBatch(rows, (Span(0, _PROBE_ROWS, _PROBE_ROWS, (0,)),), _PROBE_ROWS)
        table, head = base.embed_tokens, model.lm_head
        depth = model.config.num_hidden_layers
        kept, taps, shard, padding = self._layers, self.taps, self.shard, table.padding_idx
        try:
            self.shard, table.padding_idx = Shard(), None  # a rank's slices make a small whole model of their own
            base.layers, model.config.num_hidden_layers = layers[:1], 1
            assign(table, {"weight": self.embedding.to(self.activations)})
            assign(head, {"weight": self.head_weight.to(self.activations)})
            context = self._context(batch, self.allocate_cache(1, _PROBE_ROWS))
            expected = (
                model(input_ids=ids[None], position_ids=rows[None], use_cache=False, paged=context).logits[0].float()
            )
            self._layers, self.taps = kept[:1], ()
            hidden, _ = self.forward(ids, rows, batch, self.allocate_cache(1, _PROBE_ROWS))
            got = self.logits(hidden)
        except RuntimeError as error:
            raise self._unusual(f"the whole model cannot be run as this engine runs it ({error})") from None
        finally:
            base.layers, model.config.num_hidden_layers = layers, depth
            self._layers, self.taps, self.shard, table.padding_idx = kept, taps, shard, padding
            table.to_empty(device="meta")
            head.to_empty(device="meta")
        if isinstance(self._layers[0], FusedLayer):
            base.layers[0] = nn.Identity()
        if got.shape != expected.shape or (got - expected).abs().max() > self._tolerance * (1 + expected.abs().max()):
            raise self._unusual("it does more to its embeddings or logits than a plain embedding, norm and head do")

    def _unusual(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"target {self.facts.name!r} ({self.facts.architecture}): {what}; models with scaled embeddings, soft-capped "
            "logits or other extras are not offered"
        )

    # ---- running ------------------------------------------------------------------------------------------------

    def allocate_cache(self, num_pages: int, page_size: int) -> KVCache:
        """An empty cache for `num_pages` pages of `page_size` tokens, of this rank's heads."""
        shape = (num_pages * page_size + TILE, 2, self.num_kv_heads, self.facts.head_dim)
        return KVCache(
            [torch.zeros(shape, dtype=self.activations, device=self.device) for _ in range(self.facts.num_layers)]
        )

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """ids, positions [T] int64 → hidden states behind the final norm [T, H], and the tapped layer outputs side by
        side in tap order [T, F * H] (None without taps)."""
        num_rows = ids.shape[0]
        if all(
            isinstance(layer, FusedLayer) for layer in self._layers
        ):  # pad once; untouched layers pad in each product
            spare = fast_rows(self._dtype, self.device, num_rows) - num_rows
            if spare:
                ids, positions = nn.functional.pad(ids, (0, spare)), nn.functional.pad(positions, (0, spare))
        hidden, features = self.forward_planned(
            ids, positions, self._plan(batch), max(span.kv_len for span in batch.spans), cache
        )
        return hidden[:num_rows], None if features is None else features[:num_rows]

    @torch.inference_mode()
    def forward_planned(
        self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, num_positions: int, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same for rows [P], P ≥ T, whose attention is planned already: all P rows come back. Positions lie below num_positions."""
        x = embed(ids, self.embedding, self.shard.vocabulary(self.facts.vocab_size), self.shard).to(self.activations)
        cos, sin = self._rotary.rows(positions, num_positions)
        rotary = Rotary.from_tables(cos, sin)
        context = PagedContext(plan, cache, {})
        tapped: dict[int, torch.Tensor] = {-1: x} if -1 in self.taps else {}
        for index, layer in enumerate(self._layers):
            if isinstance(layer, FusedLayer):
                x = layer(x, rotary, plan, cache.layers[index])
            else:
                x = _call_untouched(layer, x, positions, (cos, sin), context)
            if index in self.taps:
                tapped[index] = x
        features = torch.cat([tapped[tap] for tap in self.taps], dim=-1) if self.taps else None
        return self._base.norm(x), features

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] behind the final norm → fp32 [n, V]; rows that only pad the head's matrix are not there. Of several ranks
        rank 0 gets them; the others get [n, 0]."""
        own = self._head(hidden)
        if self.shard.collectives is None:
            return own
        whole = self.shard.collectives.gather_columns(own, self.shard.vocabulary_widths(self.facts.vocab_size))
        return own[:, :0] if whole is None else whole

    def share(self) -> TargetShare:
        """What a drafter borrows of a target on one rank (`target_ends.read_target_share` otherwise)."""
        assert self.shard.size == 1, "a rank holds a part of embedding and head only"
        return TargetShare(
            embedding=self.embedding,
            head=self.logits,
            head_weight=self.head_weight,
            vocab_size=self.facts.vocab_size,
            hidden_size=self.facts.hidden_size,
            num_layers=self.facts.num_layers,
        )

    @property
    def num_fused_layers(self) -> int:
        """Layers that run fused."""
        return sum(isinstance(layer, FusedLayer) for layer in self._layers)

    def _plan(self, batch: AttentionBatch) -> AttentionPlan:
        windows = {options.window for options in self._options.values()} or {None}
        return plan_attention(batch, windows, self.num_heads // self.num_kv_heads, by_row=self.by_row)

    def _context(self, batch: AttentionBatch, cache: KVCache) -> PagedContext:
        return PagedContext(self._plan(batch), cache, {})


class _Probe:
    """A few random rows through one layer: what the untouched layer makes of them, and how it calls its attention."""

    def __init__(self, target: Target, layer: nn.Module, index: int) -> None:
        self._target, self._layer, self._index = target, layer, index
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(_PROBE_ROWS, target.facts.hidden_size, generator=generator)
        self._x = x.to(target.device, target.activations)
        self._rows = torch.arange(_PROBE_ROWS, device=target.device)
        self._batch = AttentionBatch(self._rows, (Span(0, _PROBE_ROWS, _PROBE_ROWS, (0,)),), _PROBE_ROWS)
        self._tables = target._rotary.rows(self._rows, _PROBE_ROWS)
        self.options = AttentionOptions(target.facts.head_dim**-0.5, None)

    def _cache(self) -> KVCache:
        target = self._target
        rows = torch.zeros(
            _PROBE_ROWS + TILE,
            2,
            target.num_kv_heads,
            target.facts.head_dim,
            dtype=self._x.dtype,
            device=self._x.device,
        )
        return KVCache([rows] * (self._index + 1))

    def untouched(self) -> torch.Tensor:
        groups = self._target.num_heads // self._target.num_kv_heads
        layer_type = (
            getattr(self._layer.self_attn, "sliding_window", None) if hasattr(self._layer, "self_attn") else None
        )
        windows = {None, layer_type, getattr(self._target._model.config, "sliding_window", None)}
        context = PagedContext(
            plan_attention(self._batch, windows, groups, by_row=self._target.by_row), self._cache(), {}
        )
        out = _call_untouched(self._layer, self._x, self._rows, self._tables, context)
        self.options = context.options[self._index]
        return out

    def fused(self, layer: FusedLayer) -> torch.Tensor:
        groups = self._target.num_heads // self._target.num_kv_heads
        plan = plan_attention(self._batch, {self.options.window}, groups, by_row=self._target.by_row)
        cache = self._cache()
        return layer(self._x, Rotary.from_tables(*self._tables), plan, cache.layers[self._index])


def _call_untouched(
    layer: nn.Module,
    x: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    context: PagedContext,
) -> torch.Tensor:
    out = layer(
        x[None],
        attention_mask=None,
        position_ids=positions[None],
        position_embeddings=(tables[0][None], tables[1][None]),
        use_cache=False,
        paged=context,
    )
    return (out[0] if isinstance(out, tuple) else out)[0]


class _PackedModule(nn.Module):
    """A `PackedLinear` in the place of an `nn.Linear`: any leading dimensions."""

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _pack_linears(layer: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    for name, module in list(layer.named_modules()):
        if isinstance(module, nn.Linear):
            owner, _, attribute = name.rpartition(".")
            packed = PackedLinear(weights[f"{name}.weight"], weights.get(f"{name}.bias"))
            setattr(layer.get_submodule(owner), attribute, _PackedModule(packed))


class _SummedModule(nn.Module):
    """A rowwise linear whose output is summed over the ranks."""

    def __init__(self, inner: nn.Module, shard: Shard) -> None:
        super().__init__()
        self.inner = inner
        self._shard = shard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._shard.total(self.inner(x))


def _sum_outputs(layer: nn.Module, plan: LayerPlan, shard: Shard, index: int) -> None:
    """Let an untouched layer's rowwise modules add up."""
    found = [name for name, module in layer.named_modules() if plan.style(name) == "rowwise" and name]
    if not found:
        raise CheckpointError(
            f"target: layer {index} has no rowwise module; expected some to add up over {shard.size} ranks"
        )
    for name in found:
        owner, _, attribute = name.rpartition(".")
        home = layer.get_submodule(owner)
        setattr(home, attribute, _SummedModule(getattr(home, attribute), shard))


def ends_tensor(files: TensorFiles, name: str, rows: int, hidden: int, part: slice | None = None) -> torch.Tensor:
    """An embedding or head, or `part` of its rows: rows behind the vocabulary, where a file is padded, are not read.
    Raises CheckpointError."""
    shape = files.shapes.get(name)
    if shape is None:
        raise CheckpointError(f"{files.folder}: tensor {name} is missing; expected shape {[rows, hidden]}")
    if len(shape) != 2 or shape[0] < rows or shape[1] != hidden:
        raise CheckpointError(f"{files.folder}: tensor {name}: expected shape {[rows, hidden]}, got {list(shape)}")
    return files.read(name, rows=part or slice(0, rows))


def _check_names(folder: Path, files: TensorFiles, model: Any, tied: bool) -> None:
    """Every expected tensor is there; ones that nothing would read are named, except known leftovers."""
    expected = {name for name in model.state_dict() if not (tied and name == "lm_head.weight")}
    missing = sorted(expected - set(files.shapes))
    if missing:
        raise CheckpointError(f"target {folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    extra = sorted(
        name
        for name in set(files.shapes) - expected
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq")
    )
    if extra:
        raise CheckpointError(
            f"target {folder}: {len(extra)} tensors have no place in {type(model).__name__}, the first is {extra[0]}"
        )


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress:
        progress(done, total)
