"""A drafter's config.json, of either format, as one normalised and checked description.

Formats: z-lab (flat Qwen3 keys plus `dflash_config`) and speculators (`transformer_layer_config` plus top-level keys). The raw
JSON is parsed here on purpose: transformers' Qwen3Config drops `sliding_window` and invents `layer_types` when keys that a
drafter does not need are absent. It reads no weights. Source of the rules: the official `dflash` 0.1.0 package, vLLM 0.32.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_ray.config import DrafterFacts
from dflash2_ray.errors import CheckpointError
from dflash2_ray.models.source import display_name, read_config

logger = logging.getLogger(__name__)
_DFLASH2 = {"DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel", "MuseGlimmerAssistantModel"}
_DFLASH1 = {"DFlashDraftModel"}
_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_OTHER_PROJECTORS = ("gru_hidden_dim", "emb_dim", "shift_label")
MAX_TOP_K = 256


@dataclass(frozen=True)
class LayerAttention:
    """window: width counting the query itself, None for full attention. causal: whether the block is causal in itself."""

    window: int | None
    causal: bool


@dataclass(frozen=True)
class DrafterConfig:
    """Everything the drafter model is built from. `taps`: 0-based target layers (their outputs), -1 the embeddings, in
    checkpoint order; `draft_block_size` counts the anchor. The four DFlash 2 sizes are 0 for a DFlash 1 drafter."""

    name: str
    architecture: str
    speculators_format: bool
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rope: dict[str, Any]
    rotates_halves: bool
    taps: tuple[int, ...]
    target_hidden_size: int
    num_target_layers: int | None
    draft_block_size: int
    mask_token_id: int
    attention: tuple[LayerAttention, ...]
    has_sinks: bool
    value_scale: float
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    embedding_scale: float
    output_multiplier: float
    softcap: float | None

    @property
    def is_dflash2(self) -> bool:
        """Whether there are convolutions and a candidate selector."""
        return self.selector_top_k > 0

    def as_facts(self) -> DrafterFacts:
        """The part that resolving a configuration needs."""
        layer = self.hidden_size * (
            2 * (self.num_heads + self.num_kv_heads) * self.head_dim + 3 * self.intermediate_size
        )
        convs = 0
        if self.is_dflash2:
            groups = self.hidden_size // self.conv_group_size
            convs = 2 * self.conv_kernel_size * self.hidden_size * (1 + groups) * 2
        selector = self.selector_rank * (2 * self.vocab_size + self.hidden_size)
        projection = len(self.taps) * self.target_hidden_size * self.hidden_size
        return DrafterFacts(
            name=self.name,
            architecture=self.architecture,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            draft_block_size=self.draft_block_size,
            max_position_embeddings=self.max_position_embeddings,
            weight_bytes=2 * (self.num_layers * (layer + convs) + selector + projection),
            context_window=self.context_window,
        )

    @property
    def context_window(self) -> int | None:
        """How many positions in front of a draft block any layer sees; None where one sees all."""
        widths = [layer.window for layer in self.attention]
        return None if None in widths else max(width - 1 for width in widths if width is not None)


class _Keys:
    """Looks keys up with the file's own precedence and checks types; errors name the key."""

    def __init__(self, folder: Path, *levels: Mapping[str, Any]) -> None:
        self._folder = folder
        self._levels = levels

    def get(self, name: str, default: Any = None) -> Any:
        for level in self._levels:
            if level.get(name) is not None:
                return level[name]
        return default

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"drafter {self._folder}: {message}")

    def integer(self, name: str, least: int = 1, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(f"config key {name}: expected an integer from {least}, got {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"config key {name}: expected a number, got {value!r}")
        return float(value)


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Read and check. Raises CheckpointError that names the key, what was expected and what was got."""
    folder = Path(folder)
    raw = read_config(folder)
    speculators = "speculators_model_type" in raw
    if speculators:
        backbone = raw.get("transformer_layer_config")
        if not isinstance(backbone, dict):
            raise CheckpointError(
                f"drafter {folder}: config key transformer_layer_config: expected an object, got {backbone!r}"
            )
        keys, shape = _Keys(folder, raw), _Keys(folder, backbone)
    else:
        method = raw.get("dflash_config")
        method = {} if method is None else method
        if not isinstance(method, dict):
            raise CheckpointError(f"drafter {folder}: config key dflash_config: expected an object, got {method!r}")
        keys, shape = _Keys(folder, method, raw), _Keys(folder, raw)
        backbone = raw
    architecture, dflash2 = _architecture(raw, keys, speculators)
    _refuse_variants(keys)
    num_layers = shape.integer("num_hidden_layers")
    hidden_size = shape.integer("hidden_size")
    num_heads = shape.integer("num_attention_heads")
    vocab_size = shape.integer("vocab_size")
    draft_vocab_size = keys.integer("draft_vocab_size", default=vocab_size)
    sizes = {name: keys.integer(name) if dflash2 else 0 for name in _DFLASH2_KEYS}
    if dflash2:
        _check_dflash2_sizes(keys, sizes, hidden_size, vocab_size, draft_vocab_size)
    block = keys.integer("block_size", least=2, default=16)
    _check_proposal_method(keys, raw, block)
    activation = shape.get("hidden_act", "silu")
    if activation != "silu":
        raise keys.error(f"config key hidden_act: expected 'silu', got {activation!r}")
    num_kv_heads = shape.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise keys.error(
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    cap = keys.number("final_logit_softcapping", 0.0)
    return DrafterConfig(
        name=display_name(folder),
        architecture=architecture,
        speculators_format=speculators,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=shape.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=shape.integer("head_dim", default=hidden_size // num_heads),
        rms_norm_eps=shape.number("rms_norm_eps", 1e-6),
        attention_bias=bool(shape.get("attention_bias", False)),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        max_position_embeddings=shape.integer("max_position_embeddings"),
        rope=_rope(keys, shape, backbone),
        rotates_halves=bool(keys.get("is_neox_style", keys.get("rope_is_neox_style", True))),
        taps=_taps(keys, speculators),
        target_hidden_size=keys.integer("target_hidden_size", default=hidden_size),
        num_target_layers=keys.integer("num_target_layers") if keys.get("num_target_layers") is not None else None,
        draft_block_size=block,
        mask_token_id=_mask_token_id(keys),
        attention=_attention(keys, shape, raw, num_layers, speculators, dflash2),
        has_sinks=bool(keys.get("attention_sink_bias", False)),
        value_scale=keys.number("attention_value_scale", 1.0),
        conv_kernel_size=sizes["conv_kernel_size"],
        conv_group_size=sizes["conv_group_size"],
        selector_rank=sizes["selector_rank"],
        selector_top_k=sizes["selector_top_k"],
        embedding_scale=1.0 if speculators else keys.number("input_embedding_scale", 1.0),
        output_multiplier=1.0 if speculators else keys.number("output_multiplier", 1.0),
        softcap=cap if cap > 0 and not speculators else None,
    )


def _architecture(raw: Mapping[str, Any], keys: _Keys, speculators: bool) -> tuple[str, bool]:
    names = raw.get("architectures") or []
    if speculators:
        kind = raw["speculators_model_type"]
        if kind not in ("dflash", "dflash2"):
            raise keys.error(f"config key speculators_model_type: expected 'dflash' or 'dflash2', got {kind!r}")
        return ("DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"), kind == "dflash2"
    known = [name for name in names if name in _DFLASH1 | _DFLASH2]
    if not known:
        raise keys.error(
            f"architectures: expected one of {', '.join(sorted(_DFLASH1 | _DFLASH2))}, got {names!r}; is this a drafter?"
        )
    dflash2 = known[0] in _DFLASH2
    if not dflash2:
        for name in _DFLASH2_KEYS:
            if keys.get(name) is not None:
                raise keys.error(f"config key {name} belongs to DFlash 2, but the architecture says {known[0]}")
    return known[0], dflash2


def _refuse_variants(keys: _Keys) -> None:
    if keys.get("sample_from_anchor", False):
        raise keys.error(
            "sample_from_anchor=true (the drafter's row j predicts position j + 1) is another layout; expected false"
        )
    if keys.get("use_aux_hidden_state", True) is False:
        raise keys.error("use_aux_hidden_state=false (no `fc`) is not offered; expected true")
    if keys.get("quantization_config"):
        raise keys.error(
            "config key quantization_config: quantized weights are not offered; expected bfloat16 or float32"
        )
    projector = keys.get("projector_type")
    if projector not in (None, "dflash", "dflash2", "linear"):
        raise keys.error(f"config key projector_type: {projector!r} is another drafter family; expected none")
    for name in _OTHER_PROJECTORS:
        if keys.get(name):
            raise keys.error(f"config key {name} belongs to another drafter family (Domino); expected none")


def _check_dflash2_sizes(keys: _Keys, sizes: Mapping[str, int], hidden: int, vocab: int, draft_vocab: int) -> None:
    if hidden % sizes["conv_group_size"]:
        raise keys.error(f"conv_group_size: must divide hidden_size {hidden}, got {sizes['conv_group_size']}")
    if sizes["selector_top_k"] > min(vocab, MAX_TOP_K):
        raise keys.error(f"selector_top_k: expected at most {min(vocab, MAX_TOP_K)}, got {sizes['selector_top_k']}")
    if draft_vocab != vocab:
        raise keys.error(f"draft_vocab_size: DFlash 2 needs the full vocabulary of {vocab}, got {draft_vocab}")


def _check_proposal_method(keys: _Keys, raw: Mapping[str, Any], block: int) -> None:
    speculators = raw.get("speculators_config") or {}
    if not isinstance(speculators, dict):
        raise keys.error(f"config key speculators_config: expected an object, got {speculators!r}")
    for method in speculators.get("proposal_methods") or []:
        tokens = method.get("speculative_tokens")
        if tokens is not None and tokens != block - 1:
            raise keys.error(f"speculative_tokens: expected block_size - 1 = {block - 1}, got {tokens}")


def _taps(keys: _Keys, speculators: bool) -> tuple[int, ...]:
    name = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    ids = keys.get(name)
    if (
        not isinstance(ids, list)
        or not ids
        or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
    ):
        raise keys.error(
            f"config key {name}: expected a list of target layers, got {ids!r}; guessing it would ruin acceptance"
        )
    taps = tuple(one - 1 for one in ids) if speculators else tuple(ids)
    if min(taps) < -1:
        raise keys.error(f"config key {name}: expected layer ids from -1 (embeddings), got {ids}")
    return taps


def _mask_token_id(keys: _Keys) -> int:
    for name in ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"):
        if keys.get(name) is not None:
            return keys.integer(name, least=0)
    raise keys.error("config key mask_token_id: expected a token id, got none")


def _rope(keys: _Keys, shape: _Keys, backbone: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' `rope_parameters`; a rotation over the full head, whatever the target's own config carried along."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(backbone.get(name) or {}, dict):
            raise keys.error(f"config key {name}: expected an object, got {backbone[name]!r}")
    rope = dict(backbone.get("rope_parameters") or {})
    legacy = dict(backbone.get("rope_scaling") or {})
    if legacy:
        rope = {**legacy, **rope}
        kind = legacy.get("type", "default")
        rope.setdefault("rope_type", "default" if kind == "mrope" else kind)  # mrope: copied from a multimodal target
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", shape.get("rope_theta", 1_000_000.0))
    for name in [key for key in rope if key.startswith("mrope") or key in ("partial_rotary_factor", "type")]:
        if name != "type":
            logger.warning(
                "drafter rope key %s=%r is ignored: DFlash drafters rotate the whole head by plain positions",
                name,
                rope[name],
            )
        del rope[name]
    if shape.get("partial_rotary_factor", 1.0) != 1.0:
        logger.warning("drafter key partial_rotary_factor is ignored: DFlash drafters rotate the whole head")
    if rope["rope_type"] not in ("default", "linear", "yarn", "llama3"):
        raise keys.error(f"rope_type: expected default, linear, llama3 or yarn, got {rope['rope_type']!r}")
    return rope


def _attention(
    keys: _Keys, shape: _Keys, raw: Mapping[str, Any], num_layers: int, speculators: bool, dflash2: bool
) -> tuple[LayerAttention, ...]:
    kinds = shape.get("layer_types")
    if kinds is None:
        kinds = ["full_attention"] * num_layers
    if not isinstance(kinds, list) or len(kinds) < num_layers:
        raise keys.error(f"layer_types: expected {num_layers} entries, got {kinds!r}")
    kinds = kinds[:num_layers]
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise keys.error(f"layer_types: expected full_attention or sliding_attention, got {kind!r}")
    if keys.get("use_swa", False) and "sliding_attention" not in kinds:
        kinds = ["sliding_attention"] * num_layers
    window = None
    if "sliding_attention" in kinds:
        window = keys.get("swa_window_size") or shape.get("sliding_window")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise keys.error(f"sliding_window: layers are sliding_attention, expected a width, got {window!r}")
    causal: bool | None = None
    if speculators:
        causal = not keys.get("sliding_window_non_causal", True)
    elif raw.get("is_causal") is not None:
        causal = bool(raw["is_causal"])
    elif keys.get("causal") is not None:
        causal = bool(keys.get("causal"))
    layers = []
    for kind in kinds:
        sliding = kind == "sliding_attention"
        layers.append(LayerAttention(window if sliding else None, sliding if causal is None else causal))
    return tuple(layers)
