"""`dflash2-ray verify`: proof on the user's own prompts that speculation changes no answer, in this process or of a running service."""

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash2_ray.cli.settings import (
    API_KEY_VARIABLES,
    SETTINGS_HELP,
    build_engine,
    console,
    messages,
    progress_bars,
    read_prompts,
    write_json,
)
from dflash2_ray.errors import ConfigError

if TYPE_CHECKING:
    from dflash2_ray.verification.backend import Backend

_CHECKS = ("identity", "law", "options")


def verify(
    settings: Annotated[list[str] | None, typer.Argument(help=SETTINGS_HELP)] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts: JSON object of lists by kind (`chat` goes through the chat template), a JSON list, or one per line."
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them, evenly spaced over the file.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 48,
    concurrency: Annotated[int, typer.Option(min=1, help="Company: requests in flight.")] = 16,
    checks: Annotated[str, typer.Option(help="Which checks, with commas between them.")] = ",".join(_CHECKS),
    samples: Annotated[
        int,
        typer.Option(
            min=20, help="Law: draws per prompt, with speculation and as many without. More find smaller shifts."
        ),
    ] = 500,
    law_prompts: Annotated[int, typer.Option(min=1, help="Law: how many of the prompts.")] = 4,
    option_prompts: Annotated[int, typer.Option(min=1, help="Options: how many of the prompts.")] = 4,
    margin: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Greedy: largest plain margin at which a first difference is a tie. Default: 0.001 in float32, else 0.5. Log-probabilities may differ as much.",
        ),
    ] = None,
    url: Annotated[
        str,
        typer.Option(
            help="Verify the service at this address, e.g. http://127.0.0.1:8000, instead of an engine in this process."
        ),
    ] = "",
    api_key: Annotated[
        str, typer.Option(help="Key of the service. Default: DFLASH2_API_KEY, else OPENAI_API_KEY.")
    ] = "",
    model: Annotated[str, typer.Option(help="The model that the service is expected to serve.")] = "",
    json_path: Annotated[
        str,
        typer.Option(
            "--json",
            help="Write the report to this file (- for standard output; the page goes to standard error then).",
        ),
    ] = "",
) -> None:
    """Prove that speculation changes no answer: greedy identity, the sampling law, every option.

    Exit code 0: proven; 1: an answer differs, or nothing could be proven; 2: cannot run (settings, prompts, service).
    """
    picked = [check.strip() for check in checks.split(",")]
    for check in picked:
        if check not in _CHECKS:
            raise ConfigError(f"--checks: expected {', '.join(_CHECKS)} with commas between them, got {check!r}")
    if not url and (api_key or model):
        raise ConfigError("--api-key and --model belong to a service: give --url too")
    known = read_prompts(prompts)
    if not known:
        raise ConfigError(f"prompts: {prompts} holds none")
    backend = _service(url, api_key, model, settings or []) if url else _engine(settings or [], concurrency)
    from dflash2_ray.verification.answer import Prompt
    from dflash2_ray.verification.run import run_checks, spread

    with closing(backend), progress_bars() as bars:
        task = bars.add_task("reading prompts", total=None)
        report = run_checks(
            backend,
            spread([Prompt(kind == "chat", text) for kind, text in known], num_prompts),
            checks=set(picked),
            max_tokens=max_tokens,
            company=concurrency,
            samples=samples,
            law_prompts=law_prompts,
            option_prompts=option_prompts,
            margin=margin,
            progress=lambda what, done, total: bars.update(task, description=what, completed=done, total=total),
        )
    page = messages if json_path == "-" else console
    for line in report.lines():
        page.print(line, highlight=False, markup=False, soft_wrap=True)
    if json_path:
        write_json(json_path, report.as_dict())
    if not report.passed:
        raise typer.Exit(1)


def _engine(settings: list[str], concurrency: int) -> "Backend":
    """A width that follows the load may be none, so it is held unless the user says otherwise."""
    engine = build_engine(settings, max_num_seqs=concurrency, draft_width="fixed")
    from dflash2_ray.verification.in_process import InProcess

    return InProcess(engine)


def _service(url: str, api_key: str, model: str, settings: list[str]) -> "Backend":
    if settings:
        raise ConfigError(
            f"--url verifies a service with the settings that it has; {settings[0]!r} cannot be given with it"
        )
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: expected http://HOST:PORT, got {url!r}")
    from dflash2_ray.verification.service import Service

    key = api_key or next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), None)
    return Service(url, key, model or None)
