"""`dflash2-ray bench`: does speculation pay here? Plain against speculative, side by side, at several concurrencies; with
`--widths`, every fixed draft width against the one that follows the load.

All variants run the same prompts in the same engine, in turns whose order alternates, so that a machine that slows down slows
both; medians are over the turns. The prefix cache is off unless asked for: with it, all turns behind the first begin with cached prompts.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from dflash2_ray.cli.settings import (
    SETTINGS_HELP,
    build_engine,
    console,
    messages,
    prompt_ids,
    read_prompts,
    write_json,
)
from dflash2_ray.core.generation import Generation
from dflash2_ray.errors import ConfigError


def bench(
    settings: Annotated[list[str] | None, typer.Argument(help=SETTINGS_HELP)] = None,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, as a list.")] = "1,4,16",
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts: JSON object of lists by kind, a JSON list, or one per line.")
    ] = None,
    kind: Annotated[str, typer.Option(help="Kind of the prompts to use.")] = "chat",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts per turn (at least the concurrency).")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer (ends of text are ignored).")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Turns per variant.")] = 3,
    widths: Annotated[
        str, typer.Option(help="Compare draft widths instead: numbers and `auto`, e.g. 0,1,3,7,auto.")
    ] = "",
    json_path: Annotated[
        str, typer.Option("--json", help="Write all figures to this file (- for standard output).")
    ] = "",
) -> None:
    """Measure plain against speculative decoding: TTFT, time per output token, tokens/s, acceptance by position."""
    levels = _levels(concurrency)
    known = read_prompts(prompts)
    chosen = [one for one in known if prompts is not None or one[0] == kind]
    if not chosen:
        raise ConfigError(f"--kind: expected one of {', '.join(sorted({one[0] for one in known}))}, got {kind!r}")
    # variants run the same prompts: what one of them computed must not serve the next
    engine = build_engine(settings or [], max_num_seqs=max(levels), enable_prefix_caching=False)
    most = engine.config.num_speculative_tokens
    ids = prompt_ids(engine, chosen, max_tokens)
    compares = bool(widths)
    variants = _widths(widths, most) if compares else {"plain": 0, "speculative": most} if most else {"plain": 0}
    if not most:
        messages.print("[yellow]note:[/] no drafter: only plain decoding is measured")
    rows = []
    with Progress(console=messages, transient=True) as bars:
        task = bars.add_task("bench", total=len(levels) * repeats * len(variants))
        for level in levels:
            picked = [ids[index % len(ids)] for index in range(max(num_prompts, level))]
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
            for turn in range(repeats):
                start = turn // 2 % len(variants)  # nobody is always first, last or behind the same one
                order = [*list(variants)[start:], *list(variants)[:start]]
                if turn % 2:
                    order.reverse()
                for name in order:
                    bars.update(task, description=f"concurrency {level}, {name}")
                    options: dict[str, Any] = {
                        "temperature": temperature,
                        "max_tokens": max_tokens,
                        "ignore_eos": True,
                        "seed": turn,
                    }
                    started = time.perf_counter()
                    engine.hold_draft_width(variants[name] if compares else None)
                    if not compares:
                        options["num_speculative_tokens"] = variants[name]
                    results = engine.generate(prompt_token_ids=picked, max_in_flight=level, **options)
                    runs[name].append(_figures(results, time.perf_counter() - started))
                    bars.advance(task)
            rows.append(_compare_widths(level, runs) if compares else _row(level, runs))
    engine.hold_draft_width(None)
    (_show_widths if compares else _show)(rows)
    if json_path:
        write_json(
            json_path,
            {
                "config": engine.config.as_dict(),
                "max_tokens": max_tokens,
                "temperature": temperature,
                "num_prompts": num_prompts,
                "repeats": repeats,
                "results": rows,
            },
        )


def _levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1:
        raise ConfigError(f"--concurrency: expected numbers from 1 with commas between them, got {text!r}")
    return levels


def _widths(text: str, most: int) -> dict[str, int | None]:
    """Variants by name: a fixed width, or None for `auto`. Raises ConfigError."""
    variants: dict[str, int | None] = {}
    for part in text.split(","):
        name = part.strip()
        if name != "auto" and not (name.isdigit() and int(name) <= most):
            raise ConfigError(
                f"--widths: expected `auto` and numbers from 0 to num_speculative_tokens={most}, got {name!r}"
            )
        variants[name] = None if name == "auto" else int(name)
    return variants


def _figures(results: Sequence[Generation], wall_s: float) -> dict[str, Any]:
    """One turn: medians over requests, tokens over wall time, acceptance over all steps."""
    timing = [result.metrics["timing"] for result in results]
    stats = [result.metrics["speculative_decoding"] for result in results]
    steps = sum(one["num_spec_steps"] for one in stats)
    by_position = [sum(column) for column in zip(*(one["accepted_per_position"] for one in stats), strict=True)]
    return {
        "ttft_s": statistics.median(one["time_to_first_token_s"] for one in timing),
        "tpot_s": statistics.median(one["time_per_output_token_s"] for one in timing),
        "tokens_per_s": sum(result.usage.completion_tokens for result in results) / wall_s,
        "acceptance_length": 1 + sum(one["num_accepted_draft_tokens"] for one in stats) / steps if steps else None,
        "acceptance_by_position": [count / steps for count in by_position] if steps else [],
    }


def _row(level: int, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"concurrency": level}
    for name, turns in runs.items():
        row[name] = {
            key: statistics.median(turn[key] for turn in turns) for key in ("ttft_s", "tpot_s", "tokens_per_s")
        }
        row[name] |= {key: turns[0][key] for key in ("acceptance_length", "acceptance_by_position")}
        row[name]["turns_tokens_per_s"] = [turn["tokens_per_s"] for turn in turns]
    if "speculative" in runs:
        pairs = zip(runs["plain"], runs["speculative"], strict=True)
        row["speedup"] = statistics.median(fast["tokens_per_s"] / plain["tokens_per_s"] for plain, fast in pairs)
    return row


def _compare_widths(level: int, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians by width; the best fixed width by its median, and auto's ratio to it as the median over turns."""
    speed = {name: statistics.median(turn["tokens_per_s"] for turn in turns) for name, turns in runs.items()}
    fixed = {name: value for name, value in speed.items() if name != "auto"}
    row: dict[str, Any] = {"concurrency": level, "tokens_per_s": speed}
    row["turns_tokens_per_s"] = {name: [turn["tokens_per_s"] for turn in turns] for name, turns in runs.items()}
    if fixed:
        row["best_fixed"] = best = max(fixed, key=lambda name: fixed[name])
        if "auto" in runs:
            pairs = zip(runs["auto"], runs[best], strict=True)
            row["auto_to_best"] = statistics.median(auto["tokens_per_s"] / one["tokens_per_s"] for auto, one in pairs)
    return row


def _show_widths(rows: Sequence[dict[str, Any]]) -> None:
    names = list(rows[0]["tokens_per_s"])
    table = Table("conc.", *(f"width {name}" for name in names), "best fixed", "auto / best", title="tokens/s")
    for row in rows:
        ratio = row.get("auto_to_best")
        speeds = (f"{row['tokens_per_s'][name]:.1f}" for name in names)
        table.add_row(str(row["concurrency"]), *speeds, row.get("best_fixed", ""), f"{ratio:.3f}" if ratio else "")
    console.print(table)


def _show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("conc.", "decoding", "TTFT ms", "ms/token", "tokens/s", "speed-up", "acc. length")
    for row in rows:
        for name in ("plain", "speculative"):
            if name not in row:
                continue
            one = row[name]
            length = one["acceptance_length"]
            table.add_row(
                str(row["concurrency"]),
                name,
                f"{one['ttft_s'] * 1000:.1f}",
                f"{one['tpot_s'] * 1000:.2f}",
                f"{one['tokens_per_s']:.1f}",
                f"{row['speedup']:.2f} x" if name == "speculative" else "",
                f"{length:.2f}" if length else "",
            )
    console.print(table)
    for row in rows:
        if row.get("speculative", {}).get("acceptance_by_position"):
            shares = " ".join(f"{share:.2f}" for share in row["speculative"]["acceptance_by_position"])
            console.print(f"accepted at slot 1, 2, … at concurrency {row['concurrency']}: {shares}", highlight=False)
