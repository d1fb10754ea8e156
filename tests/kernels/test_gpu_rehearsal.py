"""`tests/gpu/run` without a GPU: the rehearsal goes through every part, the report has every field, and what there is no time for says so."""

import json
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which this environment lacks")
GPU = Path(__file__).parents[1] / "gpu"
ROW = {"operator", "shape", "equal", "us", "gb_per_s", "fraction", "timed_by"}
SPLIT = {"draft", "forward", "verify", "context"}


def run(*arguments, **options):
    return subprocess.run(
        [GPU / "run", "--python", sys.executable, *arguments], capture_output=True, text=True, check=False, **options
    )


def module(name):
    spec = util.spec_from_file_location(name, GPU / f"{name}.py")
    found = util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


def test_rehearsal_goes_through_every_part(tmp_path):
    done = run("--dry-run", "--out", tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert set(report) == {"rehearsal", "device", "commit", "budget_s", "seconds", "parts"}
    assert report["rehearsal"] is True
    assert set(report["device"]) == {
        "name",
        "num_gpus",
        "memory_bytes",
        "compute_capability",
        "torch",
        "cuda",
        "triton",
    }
    parts = report["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(
        ("equality", "kernels", "lossless", "engine"), "passed"
    )
    assert not any(part.get("cut") or part.get("unfinished") for part in parts.values())

    files = parts["equality"]["files"]
    assert {f"{name}.py" for name in files} == {
        path.name for path in (GPU.parent / "kernels" / "equality").glob("test_*.py")
    }
    assert sum(one["passed"] for one in files.values()) > 5

    from dflash2_kernels import catalogue

    names = {one.OPERATOR.name for one in catalogue.MODULES}
    assert set(parts["kernels"]["implementations"]) == names
    assert {row["operator"] for row in parts["kernels"]["kernels"]} == names
    for row in parts["kernels"]["kernels"]:
        assert set(row) == ROW
        assert row["equal"] is True
        assert row["us"] > 0

    for row, placement in zip(parts["lossless"]["placements"], ("colocated", "separate"), strict=True):
        assert row["placement"] == placement
        assert row["num_wrong"] == 0
        assert (row["num_runs"], row["graphs"]) == (2, {})
        assert row["acceptance_length"] > 1

    engine = parts["engine"]
    assert engine["graphs"] == {}  # a rehearsal has none
    assert engine["operators"]["paged_attention"] == "triton interpreter"
    assert [row["requests"] for row in engine["concurrency"]] == [1, 2]
    for row in engine["concurrency"]:
        for kind in ("plain", "speculative"):
            assert row[kind]["tokens_per_s"] > 0
            assert row[kind]["step_ms"] > 0
            assert set(row[kind]["split_ms"]) == SPLIT
            assert row[kind]["split_ms"]["forward"] > 0
        assert row["speculative"]["split_ms"]["draft"] > row["plain"]["split_ms"]["draft"]
        assert row["launch_by_launch"] is None
        assert row["speculative"]["tokens_per_s_if"]["tokens_per_s"] > 0
    page = (tmp_path / "gpu.md").read_text()
    assert page.strip() in done.stdout
    assert all(name in page for name in names)


def test_what_there_is_no_time_for_is_cut_and_says_so(tmp_path):
    parts = module("parts")
    results = parts.run_parts(parts.PARTS, tmp_path, budget_s=4.0, rehearsal=True)
    assert {result["status"] for result in results.values()} == {"cut"}
    assert all("budget of 4 s" in result["reason"] for result in results.values())
    device = dict.fromkeys(("name", "torch", "cuda", "triton"), "x")
    page = module("table").page({"rehearsal": False, "device": device, "commit": "c", "seconds": 1.0, "parts": results})
    assert "engine: **cut**: the budget of 4 s was used up" in page


def test_a_part_that_breaks_takes_no_other_along(tmp_path):
    parts = module("parts")
    missing = parts.Part("broken", "no_such_script.py", 30)
    (result,) = parts.run_parts([missing], tmp_path, budget_s=60, rehearsal=True).values()
    assert result["status"] == "error"
    assert "ended with 2" in result["reason"]
    assert "no_such_script.py" in result["reason"]


def test_without_a_gpu_it_says_so(tmp_path):
    for name in ("bash", "dirname", "env"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    done = run("--out", tmp_path, env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "no NVIDIA GPU is here" in done.stderr
    assert "--dry-run" in done.stderr


def test_a_chip_is_known_by_its_drivers_name():
    names = {
        "NVIDIA H200": "H200",
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA GH200 480GB": None,
    }
    code = "import sys, json; sys.path.insert(0, sys.argv[1])\nfrom kernel_times import find_chip\nprint(json.dumps([getattr(find_chip(n), 'name', None) for n in sys.argv[2:]]))"
    done = subprocess.run([sys.executable, "-c", code, GPU, *names], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == list(names.values())
