"""`dflash2-ray verify`: proof on the user's own prompts that speculation changes no greedy answer.

Each prompt is decoded plainly and alone, then speculatively alone and in company. Where a text differs, the plain margin (top-1
minus top-2 logit) at the first difference says whether two tokens were practically tied.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from dflash2_ray.cli.settings import (
    SETTINGS_HELP,
    build_engine,
    console,
    messages,
    prompt_ids,
    read_prompts,
    write_json,
)
from dflash2_ray.errors import ConfigError

if TYPE_CHECKING:
    from dflash2_ray.llm import LLM

BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}


def verify(
    settings: Annotated[list[str] | None, typer.Argument(help=SETTINGS_HELP)] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts: JSON object of lists by kind, a JSON list, or one per line.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 50,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Company: requests in flight of the third run.")] = 16,
    margin: Annotated[
        float | None, typer.Option(help="Largest plain margin at which a first difference is a tie. Default: 0.001 in float32, 0.5 in bfloat16.")
    ] = None,
    json_path: Annotated[str, typer.Option("--json", help="Write the report to this file (- for standard output).")] = "",
) -> None:
    """Prove greedy identity: plain = speculative, token for token, alone and in company. Exit code 1 if it does not hold."""
    engine = build_engine(settings or [], max_num_seqs=concurrency, draft_width="fixed")  # a width that follows the load may be none
    if engine.config.num_speculative_tokens == 0:
        raise ConfigError("drafter: nothing to verify, no drafter is configured; set `drafter`")
    bound = BOUNDS[engine.config.dtype] if margin is None else margin
    ids = prompt_ids(engine, read_prompts(prompts)[:num_prompts], max_tokens)
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    runs = {
        "plain, in company": (concurrency, 0),
        "speculative, alone": (1, None),
        "speculative, in company": (concurrency, None),
    }
    with Progress(console=messages, transient=True) as bars:
        task = bars.add_task("plain, alone", total=1 + len(runs))
        plain = [g.token_ids for g in engine.generate(prompt_token_ids=ids, max_in_flight=1, num_speculative_tokens=0, **options)]
        bars.advance(task)
        report = []
        for name, (level, width) in runs.items():
            bars.update(task, description=name)
            results = engine.generate(prompt_token_ids=ids, max_in_flight=level, num_speculative_tokens=width, **options)
            accepted = sum(g.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for g in results)
            report.append(_compare(engine, name, ids, plain, [g.token_ids for g in results], accepted))
            bars.advance(task)
    worst = max((one["margin"] for run in report for one in run["differences"]), default=0.0)
    speculated = all(run["num_accepted_draft_tokens"] > 0 for run in report if run["run"].startswith("speculative"))
    good = worst <= bound and speculated
    for run in report:
        console.print(f"{run['run']}: {run['num_equal']} of {len(ids)} texts equal to plain decoding alone, {run['num_accepted_draft_tokens']} drafts accepted")
        for one in run["differences"]:
            console.print(f"  prompt {one['prompt']}, token {one['position']}: plain {one['plain']}, got {one['got']}, plain margin {one['margin']:.2g}")
    if json_path:
        write_json(json_path, {"dtype": engine.config.dtype, "margin_bound": bound, "passed": good, "runs": report})
    if not speculated:
        console.print("[red]failed[/]: no draft was accepted, so nothing was proven")
    elif good:
        console.print(f"[green]passed[/]: every first difference sits at a plain margin of at most {bound:g} ({engine.config.dtype})" if worst else "[green]passed[/]: every token is the same")
    else:
        console.print(f"[red]failed[/]: a text differs where the plain margin is {worst:.3g}; the bound is {bound:g}")
    if not good:
        raise typer.Exit(1)


def _compare(
    engine: "LLM", name: str, ids: Sequence[Sequence[int]], plain: Sequence[Sequence[int]], got: Sequence[Sequence[int]], accepted: int
) -> dict[str, Any]:
    differences = []
    for index, (one, other) in enumerate(zip(plain, got, strict=True)):
        position = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if position is not None:
            margins = engine.margins(ids[index], one[: position + 1])
            differences.append(
                {"prompt": index, "position": position, "plain": one[position], "got": other[position], "margin": margins[position]}
            )
    return {
        "run": name, "num_equal": len(plain) - len(differences), "num_accepted_draft_tokens": accepted, "differences": differences,
    }
