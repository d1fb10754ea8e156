"""Which slice of what a rank holds (cases B30, B31)."""

import pytest

from dflash2_ray.config import TargetFacts, check_ranks
from dflash2_ray.errors import CheckpointError, ConfigError
from dflash2_ray.models.tensor_parallel import LayerPlan, Shard

PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.mlp.down_proj": "rowwise",
    "layers.*.mlp.odd": "sequence_parallel",
}


def plan(rank, size, kv_heads=2):
    return LayerPlan(PLAN, Shard(rank, size), kv_heads, 16)


def test_slices_tile_the_weights():
    for size in (2, 4):
        rows = [plan(rank, size).part("self_attn.q_proj.weight", (64, 32)).rows for rank in range(size)]
        columns = [plan(rank, size).part("self_attn.o_proj.weight", (32, 64)).columns for rank in range(size)]
        for parts in (rows, columns):
            assert [index for part in parts for index in range(part.start, part.stop)] == list(range(64))
    assert plan(1, 2).part("self_attn.q_norm.weight", (16,)).rows is None
    assert plan(1, 2).part("input_layernorm.weight", (32,)).rows is None
    assert plan(1, 2).part("self_attn.q_proj.bias", (64,)).rows == slice(32, 64)
    assert [plan(rank, 2).part("mlp.down_proj.bias", (32,)).zero for rank in range(2)] == [False, True]


def test_key_value_heads_are_replicated_when_ranks_outnumber_them():
    rows = [plan(rank, 4).part("self_attn.k_proj.weight", (32, 32)).rows for rank in range(4)]
    assert [part.start for part in rows] == [0, 0, 16, 16]
    assert all(part.stop - part.start == 16 for part in rows)


def test_what_cannot_be_divided_is_refused_with_both_numbers():
    with pytest.raises(CheckpointError, match=r"mlp\.down_proj\.weight: 4 ranks cannot share 30"):
        plan(0, 4).part("mlp.down_proj.weight", (32, 30))
    with pytest.raises(CheckpointError, match=r"mlp\.odd is to be divided as 'sequence_parallel'"):
        plan(0, 2).part("mlp.odd.weight", (32, 32))
    with pytest.raises(CheckpointError, match="base_model_tp_plan"):
        LayerPlan(None, Shard(0, 2), 2, 16)
    facts = TargetFacts("t", "a", 1, 64, 12, 2, 16, 100, 64, "float32", 0)
    check_ranks(4, facts)
    with pytest.raises(ConfigError, match="3 ranks can neither share nor replicate the 2 key/value heads"):
        check_ranks(3, facts)
    with pytest.raises(ConfigError, match="5 ranks cannot share the 12 query heads"):
        check_ranks(5, facts)


@pytest.mark.parametrize(("vocab_size", "size"), [(259, 2), (259, 4), (5, 4), (3, 4), (100, 3)])
def test_the_vocabulary_is_tiled_whatever_its_size(vocab_size, size):
    parts = [Shard(rank, size).vocabulary(vocab_size) for rank in range(size)]
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(vocab_size))
    assert Shard(0, size).vocabulary_widths(vocab_size) == [part.stop - part.start for part in parts]
