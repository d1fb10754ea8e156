"""Every overlay, as it renders, passes types and rules; nothing under k8s/, deploy/serve or deploy/monitoring is left unused."""

import pytest
import yaml
from cluster_rules import gpus, groups, one
from rendering import OVERLAYS, ROOT, rendered, serve_config_text


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_is_wrong(overlay, problems_of):
    assert problems_of(rendered(overlay), overlay) == []


def test_overlays_are_what_their_names_say():
    shapes, strategies, tolerant = {}, {}, set()
    for overlay in OVERLAYS:
        service = one(rendered(overlay), "RayService")
        shapes[overlay] = {
            name: (group["replicas"], gpus(group)) for name, group in groups(service).items() if name != "head"
        }
        strategies[overlay] = service["spec"]["upgradeStrategy"]["type"]
        if "gcsFaultToleranceOptions" in service["spec"]["rayClusterConfig"]:
            tolerant.add(overlay)
    assert shapes == {
        "cpu-dev": {"units": (1, 0)},
        "single-node": {"units": (1, 3)},
        "multi-node": {"targets": (2, 2), "drafters": (2, 1)},
        "ha": {"targets": (2, 2), "drafters": (2, 1)},
    }
    assert strategies == {
        "cpu-dev": "NewCluster",
        "single-node": "None",
        "multi-node": "NewCluster",
        "ha": "NewCluster",
    }
    assert tolerant == {"ha"}


def test_redis_is_the_one_that_ray_is_told():
    documents = rendered("ha")
    options = one(documents, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    redis, door = one(documents, "StatefulSet"), one(documents, "Service")
    pod = redis["spec"]["template"]
    assert options["redisAddress"] == f"{door['metadata']['name']}:{door['spec']['ports'][0]['port']}"
    assert door["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (password,) = pod["spec"]["containers"][0]["env"]
    assert password["valueFrom"]["secretKeyRef"] == options["redisPassword"]["valueFrom"]["secretKeyRef"]
    guarded = [d["spec"]["podSelector"]["matchLabels"] for d in documents if d["kind"] == "NetworkPolicy"]
    assert pod["metadata"]["labels"] in guarded


def test_every_file_is_used():
    """By an overlay's resources, components, patches and generated values, or by name in this folder."""
    used = {ROOT / "k8s/README.md", ROOT / "deploy/monitoring/alerts.yaml"}
    todo = [ROOT / "k8s/overlays" / overlay for overlay in OVERLAYS]
    while todo:
        folder = todo.pop()
        file = folder / "kustomization.yaml"
        used.add(file)
        text = yaml.safe_load(file.read_text())
        names = [*text.get("resources", []), *text.get("components", []), *text.get("configurations", [])]
        names += [patch["path"] for patch in text.get("patches", []) if "path" in patch]
        names += [
            entry.partition("=")[2] for generator in text.get("configMapGenerator", []) for entry in generator["files"]
        ]
        for path in ((folder / name).resolve() for name in names):
            if path.is_dir():
                todo.append(path)
            used.add(path)
    present = {
        path
        for folder in ("k8s", "deploy/serve", "deploy/monitoring")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    }
    assert present - used == set()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_serve_configuration_is_the_file_itself(overlay):
    """Byte for byte, comments included: the overlay copies it, nobody does."""
    assert one(rendered(overlay), "RayService")["spec"]["serveConfigV2"] == serve_config_text(overlay)
