"""Configuration: every wrong key and value is named, `resolve` decides everything purely or refuses, and every key of
ServiceConfig is read by something."""

import dataclasses
import difflib
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

import dflash2_ray
from dflash2_ray.config import MIB, DrafterFacts, EngineConfig, MachineFacts, ServiceConfig, TargetFacts, resolve
from dflash2_ray.errors import ConfigError

GIB = 1024 * MIB
CPU = MachineFacts(num_gpus=0, gpu_memory_bytes=0, memory_bytes=16 * GIB)
GPU = MachineFacts(num_gpus=1, gpu_memory_bytes=80 * GIB, memory_bytes=16 * GIB)
TARGET = TargetFacts("t", "Qwen3ForCausalLM", 6, 256, 4, 2, 64, 2048, 2048, "bfloat16", 10 * MIB)
DRAFTER = DrafterFacts("d", "DFlash2", 2, 256, 2, 64, 8, 1024, 3 * MIB)
PER_TOKEN = (
    6 * 2 * 2 * 64 + 2 * 2 * 2 * 64 + 256
)  # numbers per token: target, drafter, the context row kept for other requests


def config(**keys):
    return ServiceConfig.from_keys(keys)


def resolved(machine=CPU, target=TARGET, drafter=DRAFTER, **keys):
    return resolve(config(**keys), machine, target, drafter)


# ---- keys and types -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("max_model_length", "max_model_len"),
        ("num_speculative_token", "num_speculative_tokens"),
        ("draft", "drafter"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("max-num-seqs", "max_num_seqs"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, near):
    assert difflib.get_close_matches(key, list(ServiceConfig.model_fields), n=1) == [near]
    with pytest.raises(ConfigError) as caught:
        config(**{key: 1})
    assert f"unknown key {key!r}; did you mean {near!r}?" in str(caught.value)


def test_an_unknown_key_like_no_other_lists_all():
    with pytest.raises(ConfigError, match="unknown key 'zzz'") as caught:
        config(zzz=1)
    assert "did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in ServiceConfig.model_fields)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target", 3),
        ("target", None),
        ("drafter", ["a"]),
        ("dtype", "float16"),
        ("dtype", None),
        ("device", "tpu"),
        ("generation_config", "vllm"),
        ("drafter_placement", "elsewhere"),
        ("pipeline", "parallel"),
        ("cuda_graphs", "on"),
        ("max_model_len", 1),
        ("max_model_len", "auto"),
        ("max_model_len", 10.5),
        ("tensor_parallel_size", 0),
        ("num_speculative_tokens", -1),
        ("page_size", 0),
        ("page_size", 1025),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.01),
        ("gpu_memory_utilization", float("nan")),
        ("num_kv_pages", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", 1025),
        ("max_num_seqs", None),
        ("max_num_seqs", "many"),
        ("max_num_seqs", "true"),
        ("max_num_batched_tokens", 0),
        ("max_queued_requests", -1),
        ("num_replicas", 0),
        ("num_ingress_replicas", 0),
        ("seed", "x"),
        ("seed", ""),
    ],
)
def test_a_wrong_value_names_key_and_value(key, value):
    with pytest.raises(ConfigError) as caught:
        config(**{key: value})
    assert str(caught.value).startswith(f"{key}: ")
    assert f"got {value!r}" in str(caught.value)


@pytest.mark.parametrize("key", ["max_num_seqs", "num_speculative_tokens", "page_size", "seed", "num_replicas"])
@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_no_number(key, value):
    with pytest.raises(ConfigError, match=key):
        config(**{key: value})


def test_every_problem_is_told_at_once():
    with pytest.raises(ConfigError, match=r"(?s)page_size.*; .*seed|seed.*; .*page_size"):
        config(page_size=0, seed="x")


def test_words_of_a_command_line_become_values():
    made = config(max_num_seqs="2", gpu_memory_utilization="0.5", seed="-7", target="a=b", max_model_len="64")
    assert (made.max_num_seqs, made.gpu_memory_utilization, made.seed, made.target) == (2, 0.5, -7, "a=b")
    assert made == config(max_num_seqs=2, gpu_memory_utilization=0.5, seed=-7, target="a=b", max_model_len=64)
    with pytest.raises(ConfigError, match=r"max_num_seqs: .*got '2\.5'"):
        config(max_num_seqs="2.5")


def test_the_config_is_frozen():
    made = config()
    with pytest.raises(ValidationError, match="frozen"):
        made.seed = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved().seed = 3


@pytest.mark.parametrize(
    ("keys", "wants"),
    [
        ({}, True),
        ({"drafter": "none"}, False),
        ({"drafter": "None"}, False),
        ({"num_speculative_tokens": 0}, False),
        ({"target": "smollm2"}, False),
        ({"target": "smollm2", "drafter": "x"}, True),
        ({"target": "smollm2", "drafter": "x", "num_speculative_tokens": 0}, False),
    ],
    ids=str,
)
def test_whether_a_drafter_is_wanted(keys, wants):
    assert config(**keys).wants_drafter is wants


@pytest.mark.parametrize("key", ServiceConfig.model_fields)
def test_every_key_is_read_somewhere(key):
    root = Path(dflash2_ray.__file__).parent
    own = (root / "config.py").read_text()
    resolution = own[own.index("\ndef resolve(") :]
    others = [path.read_text() for path in sorted(root.rglob("*.py")) if path.name != "config.py"]
    assert any(re.search(rf"\bconfig\.{key}\b", source) for source in [resolution, *others])


def test_every_key_is_described():
    assert all(field.description for field in ServiceConfig.model_fields.values())


# ---- resolution -----------------------------------------------------------------------------------------------------


def test_defaults():
    assert resolved().as_dict() == {
        "target": "embedded",
        "drafter": "d",
        "served_model_name": "t",
        "dtype": "bfloat16",
        "device": "cpu",
        "max_model_len": 2048,
        "tensor_parallel_size": 1,
        "drafter_placement": "colocated",
        "num_speculative_tokens": 7,
        "draft_width": "auto",
        "draft_deadline_ms": None,
        "pipeline": "serial",
        "step_timeout_s": 30.0,
        "cuda_graphs": False,
        "page_size": 16,
        "num_kv_pages": 16 * 129,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "max_queued_requests": 256,
        "seed": None,
        "drafter_max_model_len": 1024,
        "enable_prefix_caching": True,
        "drafter_window": None,
        "kv_bytes": 16 * 129 * 16 * PER_TOKEN * 4,
    }


def test_resolution_is_pure():
    for keys in ({}, {"seed": 3, "max_num_seqs": 4}, {"num_kv_pages": 200, "dtype": "float32"}):
        made, machine = config(**keys), replace(GPU)
        before = made.model_dump()
        first, second = (resolve(made, machine, TARGET, DRAFTER) for _ in range(2))
        assert first == second == resolve(config(**keys), GPU, replace(TARGET), replace(DRAFTER))
        assert made.model_dump() == before


def test_what_is_said_is_kept():
    said = {
        "target": "a",
        "drafter": "b",
        "served_model_name": "c",
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 100,
        "drafter_placement": "colocated",
        "num_speculative_tokens": 3,
        "pipeline": "serial",
        "page_size": 8,
        "num_kv_pages": 40,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 77,
        "max_queued_requests": 9,
        "seed": 1,
    }
    got = resolve(config(**said), GPU, TARGET, DRAFTER).as_dict()
    assert {key: got[key] for key in said} == said
    assert set(got) == {field.name for field in dataclasses.fields(EngineConfig)}


def test_what_the_prefix_cache_takes():
    without = resolved(enable_prefix_caching=False, num_kv_pages=200)
    assert not without.enable_prefix_caching
    assert without.kv_bytes == 200 * 16 * (PER_TOKEN - 256) * 4
    apart = {
        "drafter_placement": "separate",
        "num_kv_pages": 200,
    }  # the drafter's own context lies elsewhere, what it must be told does not
    assert resolved(**apart).kv_bytes - resolved(**apart, enable_prefix_caching=False).kv_bytes == 200 * 16 * 256 * 4
    assert resolved(num_speculative_tokens=0, num_kv_pages=200).kv_bytes == without.kv_bytes
    assert resolved(drafter=replace(DRAFTER, context_window=63)).drafter_window == 63


def test_without_a_drafter():
    got = resolved(drafter=None, target=replace(TARGET, name="other"))
    assert (got.drafter, got.num_speculative_tokens, got.drafter_max_model_len) == (None, 0, 0)
    assert got.served_model_name == "other"
    assert got.kv_bytes == got.num_kv_pages * 16 * 6 * 2 * 2 * 64 * 4
    assert resolved(drafter=None, num_speculative_tokens=0).num_speculative_tokens == 0


@pytest.mark.parametrize(
    ("asked", "own", "expected"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float32", "float32"),
        ("auto", "float16", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_dtype(asked, own, expected):
    for machine in (CPU, GPU):
        assert resolved(machine, replace(TARGET, dtype=own), dtype=asked).dtype == expected


def test_kv_takes_two_bytes_only_on_a_gpu_in_bfloat16():
    def size(machine, dtype):
        got = resolved(machine, dtype=dtype, num_kv_pages=200)
        return got.kv_bytes // (200 * 16 * PER_TOKEN)

    assert [size(CPU, "bfloat16"), size(CPU, "float32"), size(GPU, "bfloat16"), size(GPU, "float32")] == [4, 4, 2, 4]


@pytest.mark.parametrize(
    ("asked", "machine", "expected"),
    [("auto", CPU, "cpu"), ("auto", GPU, "cuda"), ("cpu", GPU, "cpu"), ("cuda", GPU, "cuda")],
)
def test_device(asked, machine, expected):
    assert resolved(machine, device=asked).device == expected


@pytest.mark.parametrize(
    ("asked", "machine", "expected"), [("auto", CPU, False), ("auto", GPU, True), ("off", GPU, False)]
)
def test_cuda_graphs(asked, machine, expected):
    assert resolved(machine, cuda_graphs=asked).cuda_graphs is expected


@pytest.mark.parametrize(
    ("drafts", "seqs", "expected"), [(7, 16, 512), (7, 64, 512), (7, 65, 520), (0, 1024, 1024), (3, 200, 800)]
)
def test_step_tokens_hold_every_block(drafts, seqs, expected):
    got = resolved(num_speculative_tokens=drafts, max_num_seqs=seqs, num_kv_pages=129)
    assert got.max_num_batched_tokens == expected


def test_b27_the_smallest_step_is_accepted_and_one_less_refused():
    assert resolved(max_num_seqs=8, num_speculative_tokens=3, max_num_batched_tokens=32).max_num_batched_tokens == 32
    for tokens in (16, 31):
        with pytest.raises(ConfigError, match=rf"max_num_batched_tokens: .*8 × 4 = 32 tokens, got {tokens}"):
            resolved(max_num_seqs=8, num_speculative_tokens=3, max_num_batched_tokens=tokens)
    assert resolved(drafter=None, max_num_seqs=8, max_num_batched_tokens=8).max_num_batched_tokens == 8


@pytest.mark.parametrize(
    ("length", "drafts", "page", "least"),
    [(2048, 7, 16, 129), (64, 0, 16, 4), (64, 1, 16, 5), (2, 0, 1, 2), (2, 7, 1024, 1)],
)
def test_kv_pages_hold_one_full_request_and_its_look_ahead(length, drafts, page, least):
    keys = {"max_model_len": length, "num_speculative_tokens": drafts, "page_size": page}
    assert resolved(**keys, num_kv_pages=least).num_kv_pages == least
    assert resolved(**keys).num_kv_pages == 16 * least
    if least > 1:
        with pytest.raises(ConfigError, match=rf"num_kv_pages: .* needs {least} pages of {page}, got {least - 1}"):
            resolved(**keys, num_kv_pages=least - 1)


def test_kv_pages_stay_in_the_memory_at_hand():
    page_bytes = 16 * PER_TOKEN * 4
    small = replace(CPU, memory_bytes=4 * 200 * page_bytes)
    assert resolved(small).num_kv_pages == 200
    assert resolved(replace(CPU, memory_bytes=4 * 129 * page_bytes)).num_kv_pages == 129
    with pytest.raises(ConfigError, match=r"num_kv_pages: .*max_model_len=2048.*lower max_model_len"):
        resolved(replace(CPU, memory_bytes=4 * 129 * page_bytes - 4))
    gpu_page = page_bytes // 2
    exact = replace(GPU, gpu_memory_bytes=2 * (13 * MIB + 1024 * MIB + 300 * gpu_page))
    assert resolved(exact, gpu_memory_utilization=0.5).num_kv_pages == 300
    with pytest.raises(ConfigError, match="but 0 MiB are left"):
        resolved(exact, gpu_memory_utilization=0.1)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: 3 ranks .* query heads"),
        ({"pipeline": "split"}, "pipeline: .*split.* needs drafter_placement=separate"),
        ({"device": "cuda"}, "device: .*no GPU"),
        ({"max_model_len": 2049}, "max_model_len: target 't' supports 2048 positions, got 2049"),
        ({"num_speculative_tokens": 8}, "num_speculative_tokens: drafter 'd' .*at most 7, got 8"),
    ],
    ids=str,
)
def test_refusals_name_the_key_and_the_values(keys, told):
    with pytest.raises(ConfigError, match=told):
        resolved(**keys)


def test_draft_slots_without_a_drafter_are_refused():
    with pytest.raises(ConfigError, match=r"num_speculative_tokens: 2 draft slots .*set `drafter`"):
        resolved(drafter=None, num_speculative_tokens=2)


@pytest.mark.parametrize("asked", [0, 1, 6, 7])
def test_draft_slots_up_to_the_trained_block(asked):
    assert resolved(num_speculative_tokens=asked).num_speculative_tokens == asked
