"""The tensors of a drafter checkpoint under one set of names, every shape checked against the config and the target.

A drafter that does not belong to its target would "work" with an acceptance near zero: everything that can tell is an error.
"""

import re
from pathlib import Path

import torch

from dflash2_ray.errors import CheckpointError
from dflash2_ray.models.drafter_config import DrafterConfig
from dflash2_ray.models.tensor_files import TensorFiles

_RENAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
    (re.compile(r"^(candidate_selector\.(?:predecessor|successor)_codebook)\.weight$"), r"\1"),
)
_OPTIONAL = {"embed_tokens.weight", "lm_head.weight", "d2t"}
_IGNORED = re.compile(r"^(t2d|verifier_norm\..*|verifier_lm_head\..*|.*rotary_emb\.inv_freq)$")


def normal_name(name: str) -> str:
    """The name under which a stored tensor is known here."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that must be there."""
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.taps) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.num_layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
            "mlp.gate_proj.weight": (config.intermediate_size, hidden),
            "mlp.up_proj.weight": (config.intermediate_size, hidden),
            "mlp.down_proj.weight": (hidden, config.intermediate_size),
        }
        if config.attention_bias:
            layer |= {"self_attn.q_proj.bias": (queries,), "self_attn.k_proj.bias": (keys,)}
            layer |= {"self_attn.v_proj.bias": (keys,), "self_attn.o_proj.bias": (hidden,)}
        if config.has_sinks:
            layer["self_attn.attention_sink_bias"] = (config.num_heads,)
        if config.is_dflash2:
            taps, groups = config.conv_kernel_size, hidden // config.conv_group_size
            for conv in ("attention_conv", "mlp_conv"):
                layer[f"{conv}.base_kernel"] = (2, taps, hidden)
                layer[f"{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if config.is_dflash2:
        table = (config.vocab_size, config.selector_rank)
        shapes["candidate_selector.predecessor_codebook"] = table
        shapes["candidate_selector.successor_codebook"] = table
        shapes["candidate_selector.hidden_projection.weight"] = (config.selector_rank, hidden)
    return shapes


def validate_drafter(
    config: DrafterConfig,
    files: TensorFiles,
    *,
    target_hidden_size: int,
    target_num_layers: int,
    target_vocab_size: int,
    target_embedding_rows: int,
) -> None:
    """Refuse a drafter that is damaged, of another kind than its config says, or of another target. Reads only headers.

    Raises CheckpointError: which tensor or key, expected, got.
    """
    _check_against_target(
        config, files, target_hidden_size, target_num_layers, target_vocab_size, target_embedding_rows
    )
    expected = expected_shapes(config)
    stored = {normal_name(name): shape for name, shape in files.shapes.items()}
    for name, shape in expected.items():
        if name not in stored:
            raise CheckpointError(f"drafter {files.folder}: tensor {name} is missing; expected shape {list(shape)}")
        if stored[name] != shape:
            raise CheckpointError(
                f"drafter {files.folder}: tensor {name}: expected shape {list(shape)}, got {list(stored[name])}"
            )
    for name, shape in stored.items():
        if name in expected or _IGNORED.match(name):
            continue
        if name not in _OPTIONAL:
            hint = (
                " (DFlash 2 tensors, but the config says DFlash 1)"
                if re.search(r"_conv\.|candidate_selector", name)
                else ""
            )
            raise CheckpointError(
                f"drafter {files.folder}: tensor {name} {list(shape)} has no place in {config.architecture}{hint}"
            )
    _check_optional(config, files, stored, target_vocab_size)


def _check_against_target(
    config: DrafterConfig, files: TensorFiles, hidden: int, num_layers: int, vocab_size: int, embedding_rows: int
) -> None:
    where = f"drafter {files.folder}: wrong drafter for this target: "
    if config.target_hidden_size != hidden:
        raise CheckpointError(
            f"{where}it was trained on features of width {config.target_hidden_size}, the target's are {hidden}"
        )
    if config.num_target_layers is not None and config.num_target_layers != num_layers:
        raise CheckpointError(
            f"{where}num_target_layers is {config.num_target_layers}, the target has {num_layers} layers"
        )
    if max(config.taps) >= num_layers:
        raise CheckpointError(f"{where}it taps layer {max(config.taps)}, the target has layers 0 … {num_layers - 1}")
    own_ends = {"embed_tokens.weight", "lm_head.weight"} <= {normal_name(name) for name in files.shapes}
    if config.hidden_size != hidden and not own_ends:
        raise CheckpointError(
            f"{where}its hidden size is {config.hidden_size}, the target's embedding has width {hidden}"
        )
    if config.mask_token_id >= embedding_rows:
        raise CheckpointError(
            f"{where}mask_token_id {config.mask_token_id} is beyond the target's {embedding_rows} embedding rows"
        )
    if config.vocab_size < vocab_size:
        raise CheckpointError(f"{where}its vocabulary has {config.vocab_size} entries, the target's {vocab_size}")


def _check_optional(
    config: DrafterConfig, files: TensorFiles, stored: dict[str, tuple[int, ...]], target_vocab_size: int
) -> None:
    where = f"drafter {files.folder}: tensor "
    head = stored.get("lm_head.weight")
    own_map = config.draft_vocab_size != config.vocab_size
    if own_map and ("d2t" not in stored or head is None):
        raise CheckpointError(
            f"{where}d2t and lm_head.weight are needed with draft_vocab_size {config.draft_vocab_size}"
        )
    if "d2t" in stored and stored["d2t"] != (config.draft_vocab_size,):
        raise CheckpointError(f"{where}d2t: expected shape {[config.draft_vocab_size]}, got {list(stored['d2t'])}")
    for name, least in (
        ("lm_head.weight", config.draft_vocab_size if own_map else target_vocab_size),
        ("embed_tokens.weight", target_vocab_size),
    ):
        shape = stored.get(name)
        if shape is not None and (len(shape) != 2 or shape[0] < least or shape[1] != config.hidden_size):
            raise CheckpointError(f"{where}{name}: expected shape {[least, config.hidden_size]}, got {list(shape)}")


def read_tensors(files: TensorFiles, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """All tensors under their normal names, floating ones in `dtype`."""
    tensors = {}
    for name in files.shapes:
        normal = normal_name(name)
        if not _IGNORED.match(normal):
            value = files.read(name)
            tensors[normal] = value.to(device, dtype) if value.is_floating_point() else value.to(device)
    return tensors


def read_projection(folder: Path, dtype: torch.dtype, device: str) -> torch.Tensor:
    """`fc.weight` alone: it runs with the target."""
    files = TensorFiles(folder)
    name = next((name for name in files.shapes if normal_name(name) == "fc.weight"), None)
    if name is None:
        raise CheckpointError(f"drafter {folder}: tensor fc.weight is missing")
    return files.read(name).to(device, dtype)
