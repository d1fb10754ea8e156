"""Guards: names that must not clash, what a wheel holds, that importing the package is cheap, and that no machine leaks in."""

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _tracked():
    out = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in out.splitlines()]


def test_kernels_is_a_source_root_and_never_a_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = importlib.util.find_spec("kernels")
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or [])]
    assert not any(str(ROOT) in str(place) and spec.origin for place in places)


def test_tests_are_no_packages():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_console_script_and_versions_agree():
    import dflash2_ray

    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{dflash2_ray.__version__}"' in text
    assert 'dflash2-ray = "dflash2_ray.cli:main"' in text


def test_constraints_pin_what_pyproject_asks_for():
    pins = dict(
        line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    text = (ROOT / "pyproject.toml").read_text()
    wanted = set(re.findall(r'^\s*"([a-zA-Z0-9_.-]+)(?:\[[a-z,]+\])?[<>=]', text, re.M)) - {"setuptools"}
    normal = {name.replace("_", "-"): value for name, value in pins.items()}
    assert not {name for name in wanted if name.lower().replace("_", "-") not in normal} - {"build"}


def test_wheel_holds_exactly_the_two_packages_and_the_assets(tmp_path):
    pytest.importorskip("setuptools")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-q",
            "-w",
            str(tmp_path),
            str(ROOT),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"dflash2_ray", "dflash2_kernels"}
    for asset in (
        "target/model.safetensors",
        "drafter/model.safetensors",
        "target/tokenizer.json",
        "prompts.json",
        "README.md",
    ):
        assert f"dflash2_ray/assets/{asset}" in names
    assert "dflash2_ray/py.typed" in names
    assert "dflash2_kernels/py.typed" in names
    for name in ("bf16_linear.c", "row_attention.c", "row_passes.c", "exponential.h"):
        assert f"dflash2_kernels/{name}" in names


def test_no_machine_path_and_no_shared_folder_in_tracked_files():
    forbidden = re.compile(r"/work/|/opt/pypi|\.\./shared|/root/")
    own = Path(__file__).name
    for path in _tracked():
        if path.suffix in {".safetensors", ".json"} or path.name == own or not path.is_file():
            continue
        found = forbidden.search(path.read_text(encoding="utf-8", errors="replace"))
        assert found is None, f"{path.relative_to(ROOT)}: {found.group()}"


def test_layers_hold():
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]


def test_every_module_says_what_it_is():
    for path in (ROOT / "dflash2_ray").rglob("*.py"):
        assert path.read_text(encoding="utf-8").startswith('"""'), path
