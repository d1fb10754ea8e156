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
    placement: Annotated[
        str,
        typer.Option(
            "--placement",
            metavar="CLUSTER",
            help="Print which GPU each worker would take on a cluster given as "
            "GPUs per node: `4,1` or `a=4,b=1:zone=eu` (name, GPUs, node labels). Reads no checkpoint.",
        ),
    ] = "",
    json_path: Annotated[
        str, typer.Option("--json", help="Write the report as JSON to this file (- for standard output).")
    ] = "",
) -> None:
    """Resolve a configuration, plan the memory, and check that drafter and target fit; loads no weights."""
    if keys:
        _list_keys()
        return
    config = read_config(settings or [])
    if placement:
        _show_placement(config, placement)
        return
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
    one_process = report.config.tensor_parallel_size == 1 and report.config.drafter_placement == "colocated"
    total = [("total", sum(size for _, size in report.memory))] if one_process else []
    for name, size in (*report.memory, *total):
        memory.add_row(name, f"{size / 2**20:,.1f} MiB")
    console.print(memory)
    for warning in report.warnings:
        console.print(f"[yellow]note:[/] {warning}")
    console.print("[green]ok[/]: this configuration can run" + (", drafter and target fit" if report.drafter else ""))


def _show_placement(config: ServiceConfig, cluster: str) -> None:
    """The GPU map, a row per GPU of every node. Raises ConfigError when it does not fit."""
    from dflash2_ray.engine.placement import map_gpus, parse_cluster

    nodes = parse_cluster(cluster)
    seats = {(seat.node, seat.gpu): f"unit {seat.unit} {seat.role}" for seat in map_gpus(config, nodes)}
    if not seats:
        console.print("no GPU is used: every worker is a CPU process, placed by Ray where CPUs are free")
        return
    table = Table("node", "GPU", "worker", title="placement", title_justify="left")
    for node in nodes:
        for gpu in range(node.num_gpus):
            table.add_row(node.name, str(gpu), seats.get((node.name, gpu), "[dim]free[/]"))
    console.print(table)


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
