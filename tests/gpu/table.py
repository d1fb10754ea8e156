"""The report of a run as one page of Markdown."""

from collections.abc import Iterator
from typing import Any


def page(report: dict[str, Any]) -> str:
    """`report`: what main.py writes as JSON."""
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    device = report["device"]
    yield f"# {device['name']}{', a rehearsal: the numbers mean nothing' if report['rehearsal'] else ''}"
    yield f"torch {device['torch']} · triton {device['triton']} · CUDA {device['cuda']} · commit {report['commit']} · {report['seconds']:.0f} s"
    yield ""
    parts = report["parts"]
    for name, part in parts.items():
        cut = f"; cut: {', '.join(part['cut'])}" if part.get("cut") else ""
        reason = f": {part['reason'].strip().splitlines()[-1]}" if part.get("reason") else ""
        yield f"* {name}: **{part['status']}**{reason}{cut}"
    files = parts["equality"].get("files", {})
    if files:
        yield "\n| equality, compiled | passed | failed |\n| --- | ---: | ---: |"
        for name, one in files.items():
            yield f"| {name} | {one['passed']} | {one['failed']} |"
        for one in files.values():
            yield from (f"* {failure}" for failure in one["failures"])
    kernels = parts["kernels"].get("kernels", [])
    if kernels:
        yield "\n| kernel | shape | equal | µs | GB/s | of peak |\n| --- | --- | --- | ---: | ---: | ---: |"
        for row in kernels:
            told = {True: "yes", False: "**no**", None: "not checked"}[row["equal"]]
            numbers = [_number(row["us"], ".2f"), _number(row["gb_per_s"], ".0f"), _number(row["fraction"], ".0%")]
            yield f"| {row['operator']} | {row['shape']} | {row.get('error') or told} | {' | '.join(numbers)} |"
    for row in parts["lossless"].get("placements", []):
        yield (
            f"\nLossless, {row['placement']} drafter: {row['num_texts'] - row['num_wrong']} of {row['num_texts']} texts of {row['num_tokens']} "
            f"tokens equal ({row['num_ties']} at a tie), acceptance length {_number(row['acceptance_length'], '.2f')}"
        )
    rows = parts["engine"].get("concurrency", [])
    if rows:
        yield "\n| requests | decoding | tokens/s | step ms | draft | forward | verify | context | acceptance length | tokens/s at 4 a step (modelled) |"
        yield "| ---: | --- |" + " ---: |" * 8
        for row in rows:
            for kind in ("plain", "speculative"):
                one = row[kind]
                split = [_number(value, ".2f") for value in one["split_ms"].values()]
                modelled = one.get("tokens_per_s_if", {}).get("tokens_per_s")
                cells = [_number(one["tokens_per_s"], ".0f"), _number(one["step_ms"], ".2f"), *split]
                yield f"| {row['requests']} | {kind} | {' | '.join(cells)} | {_number(one['acceptance_length'], '.2f')} | {_number(modelled, '.0f')} |"
    for name, graphs in parts["engine"].get("graphs", {}).items():
        yield f"\nCUDA graphs of {name}: {graphs['failure'] or graphs['num_graphs']}, {graphs['num_replays']} replays"
    for row in rows:
        if row["launch_by_launch"]:
            steps = [
                f"{kind} {row[kind]['step_ms']:.2f} ms, {row['launch_by_launch'][f'{kind}_step_ms']:.2f} ms without"
                for kind in ("plain", "speculative")
            ]
            yield f"* a step of {row['requests']} with graphs: {'; '.join(steps)}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
