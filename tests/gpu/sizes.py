"""The sizes of a run: the published pair on a GPU, a tiny one in a rehearsal."""

from dataclasses import dataclass

from dflash2_kernels import published_shapes as published


@dataclass(frozen=True)
class Sizes:
    """batches: requests per step. kv_lens: context lengths of attention. max_model_len, prompt_len, new_tokens: of the engine's requests."""

    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    target_layers: int
    drafter_layers: int
    taps: tuple[int, ...]
    draft_block: int
    candidates: int
    rank: int
    conv_taps: int
    conv_group: int
    batches: tuple[int, ...]
    kv_lens: tuple[int, ...]
    max_model_len: int
    prompt_len: int
    new_tokens: int


REAL = Sizes(
    published.HIDDEN, 9728, published.VOCAB, published.NUM_HEADS, published.NUM_KV_HEADS, published.HEAD_DIM, published.TARGET_LAYERS,
    published.DRAFTER_LAYERS, (1, 9, 17, 25, 33), published.DRAFT_BLOCK, published.CANDIDATES, published.SELECTOR_RANK, published.CONV_TAPS,
    published.CONV_GROUP, published.BATCHES, (512, 8192), max_model_len=512, prompt_len=128, new_tokens=96,
)  # fmt: skip
TINY = Sizes(
    32, 48, 67, 4, 2, 8, 2, 1, (0, 1), 4, 4, 8, 2, 8, (1, 2), (9,), max_model_len=64, prompt_len=6, new_tokens=8
)


def sizes(rehearsal: bool) -> Sizes:
    return TINY if rehearsal else REAL
