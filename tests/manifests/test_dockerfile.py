"""deploy/Dockerfile without a Docker daemon: parsed, its commands run where they can be, and held against the manifests that use it."""

import fnmatch
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile

import pytest
from cluster_rules import groups, one, ray_container
from dockerfile_parse import DockerfileParser
from rendering import OVERLAYS, ROOT, rendered

KNOWN = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "EXPOSE", "HEALTHCHECK", "CMD"}
IN_IMAGE = "/etc/dflash2/serve/"


@pytest.fixture(scope="module")
def steps():
    """(instruction, value) of every step but comments, and where the last stage begins."""
    parser = DockerfileParser(fileobj=(ROOT / "deploy/Dockerfile").open("rb"))
    rows = [(row["instruction"], row["value"]) for row in parser.structure if row["instruction"] != "COMMENT"]
    assert {instruction for instruction, _ in rows} <= KNOWN
    return rows


def last_stage(steps):
    return steps[max(index for index, (instruction, _) in enumerate(steps) if instruction == "FROM") :]


def value(steps, instruction):
    (found,) = [text for name, text in last_stage(steps) if name == instruction]
    return found


def test_it_runs_as_the_user_and_on_the_ports_of_the_manifests(steps):
    user, _, group = value(steps, "USER").partition(":")
    ports = set(map(int, value(steps, "EXPOSE").split()))
    for overlay in OVERLAYS:
        for name, each in groups(one(rendered(overlay), "RayService")).items():
            context = each["template"]["spec"]["securityContext"]
            assert (str(context["runAsUser"]), str(context["runAsGroup"])) == (user, group)
            inside = {port["containerPort"] for port in ray_container(each)["ports"] if port["name"] != "gcs-server"}
            assert inside <= ports, name


def test_probes_find_their_commands(steps):
    """The slim image has bash and grep of its own."""
    (installed,) = [text for name, text in last_stage(steps) if name == "RUN" and "apt-get install" in text]
    packages = set(re.search(r"--no-install-recommends ([a-z0-9 .-]+?) &&", " ".join(installed.split()))[1].split())
    assert "wget" in packages
    commands = [
        ray_container(group)[kind]["exec"]["command"]
        for overlay in OVERLAYS
        for group in groups(one(rendered(overlay), "RayService")).values()
        for kind in ("readinessProbe", "livenessProbe")
        if "exec" in ray_container(group)[kind]
    ]
    words = {word for command in commands for part in re.split(r"\||&&", command[-1]) for word in part.split()[:1]}
    assert words | {command[0] for command in commands} <= packages | {"bash", "grep"}
    assert value(steps, "HEALTHCHECK").split("CMD ")[1].startswith("wget ")
    assert "/ready" in value(steps, "HEALTHCHECK")


def test_no_version_is_written_out(steps):
    """All come from constraints.txt; Python is the one that the project asks for."""
    assert not [text for _, text in steps if re.search(r"[a-z]==\d", text)]
    bases = {text.split()[0] for name, text in steps if name == "FROM"}
    assert len(bases) == 1
    wanted = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert bases.pop().startswith(f"python:{wanted}-slim")


def test_it_serves_a_configuration_that_it_holds(steps):
    words = value(steps, "CMD").strip("[]").replace('"', "").split(", ")
    assert words[:2] == ["serve", "run"]
    assert words[2].startswith(IN_IMAGE)
    assert (ROOT / "deploy/serve" / words[2].removeprefix(IN_IMAGE)).is_file()


def _copied(steps):
    """Sources of every COPY from the build's context."""
    rows = [text.split() for name, text in steps if name == "COPY" and "--from" not in text]
    return [source for *sources, _ in rows for source in sources]


def _is_sent(name):
    """By the rules of Dockerfile.dockerignore: the last one that fits decides; a folder stands for what is in it."""
    sent = True
    for rule in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines():
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!")
        parts = name.split("/")
        fits = pattern == "*" or any(
            fnmatch.fnmatch("/".join(parts[:end]), pattern.removeprefix("**/")) for end in range(1, len(parts) + 1)
        )
        fits = fits or (pattern.startswith("**/") and pattern.removeprefix("**/") in parts)
        sent = rule.startswith("!") if fits else sent
    return sent


def test_what_it_copies_is_sent_and_makes_the_wheel(steps, tmp_path):
    """The context as the ignore file leaves it, the first stage's copies, and a wheel from them."""
    context = tmp_path / "context"
    for source in _copied(steps):
        found = list(ROOT.glob(source))
        assert found, source
        for path in found:
            files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
            sent = [file for file in files if _is_sent(str(file.relative_to(ROOT)))]
            assert sent, f"{source} is ignored"
            for file in sent:
                target = context / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)
    assert not list(context.rglob("__pycache__"))
    assert not (context / "tests").exists()
    (command,) = [text for name, text in steps if name == "RUN" and text.startswith("pip wheel")]
    words = command.replace("/wheels", str(tmp_path)).split()
    done = subprocess.run(
        [sys.executable, "-m", *words, "--no-build-isolation", "-q"],
        cwd=context,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "dflash2_ray/assets/target/model.safetensors" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize("torch", ["gpu", "cpu"])
def test_its_install_commands_ask_for_the_pinned_versions(torch, steps, tmp_path):
    """The shell of both install steps, with a pip that only writes down what it is asked."""
    constraints, asked = tmp_path / "constraints.txt", tmp_path / "asked"
    shutil.copy(ROOT / "constraints.txt", constraints)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/dflash2_ray-0-py3-none-any.whl").touch()
    pip = tmp_path / "pip"
    pip.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    pip.chmod(pip.stat().st_mode | stat.S_IEXEC)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TORCH": torch, "TORCH_CPU_INDEX": "https://index"}
    commands = [text for name, text in last_stage(steps) if name == "RUN" and "pip install" in text]
    assert len(commands) == 2
    for command in commands:
        subprocess.run(["sh", "-ec", command.replace("/tmp/", f"{tmp_path}/")], env=environment, check=True)
    pinned = re.search(r"^torch==.+$", (ROOT / "constraints.txt").read_text(), re.M)[0]
    first, second = asked.read_text().splitlines()
    assert first.endswith(pinned)
    assert ("--index-url https://index" in first) == (torch == "cpu")
    assert second.endswith("dflash2_ray-0-py3-none-any.whl")
    assert f"-c {constraints}" in second
    left = set((ROOT / "constraints.txt").read_text().splitlines()) - set(constraints.read_text().splitlines())
    assert {line.partition("==")[0] for line in left} == {"triton"}
