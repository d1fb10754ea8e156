"""`dflash2-ray check`: what would run, decided without reading a weight."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from dflash2_ray.cli.settings import SETTINGS_HELP, console, loading_bar, read_config, write_json
from dflash2_ray.config import ServiceConfig


def check(
    settings: Annotated[list[str] | None, typer.Argument(help=SETTINGS_HELP)] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every setting with its default and meaning.")] = False,
    json_path: Annotated[str, typer.Option("--json", help="Write the report as JSON to this file (- for standard output).")] = "",
) -> None:
    """Resolve a configuration, plan the memory, and check that drafter and target fit; loads no weights."""
    if keys:
        _list_keys()
        return
    config = read_config(settings or [])
    with loading_bar() as progress:
        from dflash2_ray.llm import check_config

        report = check_config(config, progress)
    if json_path:
        write_json(json_path, asdict(report))
        if json_path == "-":
            return
    _show("target", asdict(report.target) | {"folder": report.target_folder})
    if report.drafter:
        _show("drafter", asdict(report.drafter) | {"folder": report.drafter_folder})
    _show("resolved configuration", report.config.as_dict())
    memory = Table(title="memory plan", title_justify="left", show_header=False)
    for name, size in (*report.memory, ("total", sum(size for _, size in report.memory))):
        memory.add_row(name, f"{size / 2**20:,.1f} MiB")
    console.print(memory)
    for warning in report.warnings:
        console.print(f"[yellow]note:[/] {warning}")
    console.print("[green]ok[/]: this configuration can run" + (", drafter and target fit" if report.drafter else ""))


def _show(title: str, values: dict[str, Any]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in values.items():
        table.add_row(name, str(value))
    console.print(table)


def _list_keys() -> None:
    table = Table("key", "default", "meaning")
    for name, field in ServiceConfig.model_fields.items():
        table.add_row(name, str(field.default), field.description or "")
    console.print(table)
