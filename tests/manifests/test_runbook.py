"""k8s/README.md, and kubectl in README.md: every command is one that kubectl takes, every name in it is one that the manifests have."""

import re
import shlex
import subprocess

import pytest
from cluster_rules import groups, one, ray_container
from rendering import OVERLAYS, ROOT, kubectl, rendered

TEXT = (ROOT / "k8s/README.md").read_text()


def commands(text):
    """Lines of the bash blocks, without their comments."""
    return [
        line.partition("  #")[0].strip()
        for block in re.findall(r"```bash\n(.*?)```", text, re.S)
        for line in block.splitlines()
        if line
    ]


COMMANDS = commands(TEXT)
KUBECTL = [
    line
    for line in dict.fromkeys([*COMMANDS, *commands((ROOT / "README.md").read_text())])
    if line.startswith("kubectl ")
]
NOWHERE = ["--server=http://127.0.0.1:1", "--request-timeout=1s"]


@pytest.mark.parametrize("command", KUBECTL)
def test_kubectl_takes_it(command, tmp_path):
    """There is no cluster: a command is good when nothing but the connection fails."""
    (tmp_path / "api-keys.txt").write_text("key\n")
    given = None
    for part in command.split(" | "):
        words = [str(ROOT / word) if word.startswith("k8s/") else word for word in shlex.split(part)[1:]]
        offline = words[0] == "kustomize" or "--dry-run=client" in words
        asked = [kubectl(), *words, *([] if offline else NOWHERE)]
        done = subprocess.run(asked, cwd=tmp_path, input=given, capture_output=True, text=True, check=False)
        if offline:
            assert done.returncode == 0, done.stderr
        else:
            assert "refused" in done.stderr, done.stderr
        given = done.stdout


def test_other_commands_are_known():
    others = [shlex.split(line) for line in COMMANDS if not line.startswith("kubectl ")]
    assert {words[0] for words in others} == {"helm", "docker"}
    for words in others:
        if words[:2] == ["docker", "build"]:
            assert (ROOT / words[words.index("-f") + 1]).is_file()
    for name, value in re.findall(r"--build-arg ([A-Z_]+)=(\w+)", TEXT):
        text = (ROOT / "deploy/Dockerfile").read_text()
        assert f"ARG {name}" in text
        assert f'"${name}" = {value}' in text


def test_secrets_that_are_made_are_those_that_are_asked_for():
    made = {
        (words[6], key)
        for words in (shlex.split(line) for line in COMMANDS if "create secret" in line)
        for key in [word.partition("=")[2].partition("=")[0] for word in words if word.startswith("--from-")]
    }
    assert made == set(_asked_secrets())


def _asked_secrets():
    """(name, key) of every Secret that a pod cannot start without."""
    for overlay in OVERLAYS:
        documents = rendered(overlay)
        service = one(documents, "RayService")
        containers = [ray_container(group) for group in groups(service).values()]
        containers += [d["spec"]["template"]["spec"]["containers"][0] for d in documents if d["kind"] == "StatefulSet"]
        for entry in (entry for container in containers for entry in container.get("env", [])):
            reference = entry.get("valueFrom", {}).get("secretKeyRef")
            if reference and not reference.get("optional"):
                yield reference["name"], reference["key"]
        for group in groups(service).values():
            for volume in (volume for volume in group["template"]["spec"].get("volumes", []) if "secret" in volume):
                yield from ((volume["secret"]["secretName"], item["key"]) for item in volume["secret"]["items"])


def test_names_are_those_of_the_manifests():
    service = one(rendered("ha"), "RayService")
    name = service["metadata"]["name"]
    assert f"service/{name}-serve-svc" in TEXT  # the operator's name for the Service of the proxies
    assert set(re.findall(r"rayservice[/ ]([a-z0-9-]+)", TEXT)) == {name}
    assert set(re.findall(r"-n ([a-z0-9-]+)", TEXT)) == {service["metadata"]["namespace"]}
    labels = re.findall(r"kubectl label namespace \S+ (\S+)=(\S+)", TEXT)
    policy = one(rendered("cpu-dev"), "NetworkPolicy")
    admitted = [
        peer.get("namespaceSelector", {}).get("matchLabels", {})
        for rule in policy["spec"]["ingress"]
        for peer in rule["from"]
    ]
    assert all({key: value} in admitted for key, value in labels)
    assert labels
    for overlay in re.findall(r"k8s/overlays/([a-z-]+)", TEXT):
        assert overlay in OVERLAYS
    for component in re.findall(r"components/([a-z-]+)", TEXT):
        assert (ROOT / "k8s/components" / component).is_dir()
    assert {overlay for overlay in OVERLAYS if f"| `{overlay}` |" in TEXT} == set(OVERLAYS)
