"""README.md: every command in it is one that its program takes, and every file in it is there.

The lines of kubectl are in tests/manifests/test_runbook.py, the Python snippets run in tests/serve/test_life.py.
"""

import ast
import json
import os
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from dflash2_ray import cli
from dflash2_ray.cli.settings import read_settings
from dflash2_ray.config import ServiceConfig

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
KUBECTL = "kubectl "


def blocks(language):
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", TEXT, re.S | re.M)


def commands():
    """Every command of the README as words: lines of the bash blocks, and what stands in backquotes and begins with a program of ours."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^ *```.*?^ *```", "", TEXT, flags=re.S | re.M)
    ours = r"(?:[A-Z][A-Z0-9_]*=\S+ )*(?:python |dflash2-ray |serve run |(?:\./)?(?:tests/(?:conformance/)?run|deploy/quickstart)$)"
    lines += [span for span in re.findall(r"`([^`\n]+)`", prose) if re.match(ours, span)]
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):  # a variable of the environment
            words = words[1:]
        if words and f"{words[0]} " != KUBECTL:
            yield words


ALL = sorted({tuple(words) for words in commands()})


def settings_of(words):
    return ServiceConfig.from_keys(read_settings([word for word in words if re.match(r"[a-z0-9_.]+=", word)]))


def takes(words):
    """`dflash2-ray`: options and settings, by the command's own parser. `[KEY=VALUE …]` is left out."""
    words = ["PROMPT" if word == "[MESSAGE]" else word for word in words if not re.match(r"\[KEY=VALUE|…", word)]
    command = typer.main.get_command(cli.app).commands[words[0]]
    context = command.make_context(words[0], list(words[1:]), resilient_parsing=False)
    settings_of([setting for setting in context.params.get("settings") or [] if not context.params.get("url")])


def is_there(words):
    """A script of this project: it is there, and knows the options."""
    path = ROOT / words[0]
    assert path.is_file()
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        ast.parse(source)
    else:
        assert os.access(path, os.X_OK)
    assert [word for word in words[1:] if word.strip("[]").startswith("--") and word.strip("[]") not in source] == []


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_a_command_is_one_that_its_program_takes(words):
    match words:
        case ["dflash2-ray", *rest]:
            takes(rest)
        case ["serve", "run", "dflash2_ray.app", *rest]:
            settings_of(rest)
        case ["serve", "run", path]:
            (application,) = yaml.safe_load((ROOT / path).read_text())["applications"]
            assert application["import_path"] == "dflash2_ray.app"
        case ["curl", url, *rest]:
            assert (
                f'"{url.removeprefix("http://127.0.0.1:8000")}"' in (ROOT / "dflash2_ray/serving/routes.py").read_text()
            )
            json.loads(rest[rest.index("-d") + 1])
        case ["docker", "build", *rest]:
            assert (ROOT / rest[rest.index("-f") + 1]).is_file()
        case ["python", *rest]:
            is_there(rest)
        case [script, *rest]:
            is_there([script.removeprefix("./"), *rest])


def test_every_kind_of_command_is_there():
    """The search above finds what it should."""
    assert {words[0] for words in ALL} >= {
        "./deploy/quickstart",
        "./tests/run",
        "tests/run",
        "serve",
        "curl",
        "dflash2-ray",
        "docker",
        "python",
    }
    assert {words[1] for words in ALL if words[0] == "dflash2-ray"} >= {"check", "generate", "chat", "bench", "verify"}


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)[)#]", TEXT):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:tests|deploy|k8s|kernels|dflash2_ray)/[\w./-]+)`", TEXT):
        assert (ROOT / path).exists(), path


def test_the_configuration_snippet_is_valid():
    from ray.serve.schema import ServeDeploySchema

    (snippet,) = [block for block in blocks("yaml") if "applications:" in block]
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(snippet)).applications
    config = ServiceConfig.from_keys(application.args)
    for deployment in application.deployments:
        assert config.tuned(deployment.user_config) != config
