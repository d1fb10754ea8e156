"""Part: every kernel, compiled on this GPU, against its reference: tests/kernels/equality, one process per file, side by side."""

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from part_script import PartScript

FOLDER = Path(__file__).parents[1] / "kernels" / "equality"
_IN_A_REHEARSAL = (
    "the_kernel_is_what_runs_here or nothing_to_do or no_requests or bits_are_those"  # cheap ones, of most files
)


def main() -> None:
    part = PartScript()
    files = sorted(FOLDER.glob("test_*.py"))
    groups = [files] if part.rehearsal else [[file] for file in files]  # a GPU's machine compiles on many cores
    waiting, running, reports = list(groups), [], []
    with_room = max(1, (os.cpu_count() or 1) - 1)
    while (waiting or running) and part.left_s > 3:
        while waiting and len(running) < with_room:
            reports.append((waiting[0], part.path.with_name(f"equality-{waiting[0][0].stem}.xml")))
            reports[-1][1].unlink(missing_ok=True)
            running.append(_start(*reports[-1], part.rehearsal))
            waiting.pop(0)
        running = [process for process in running if process.poll() is None]
        time.sleep(0.2)
    for process in running:
        process.kill()
    found = {file.stem: {"passed": 0, "failed": 0, "skipped": 0, "failures": []} for file in files}
    unfinished = [file.stem for group in waiting for file in group]
    for group, report in reports:
        if report.is_file():
            _read(report, found)
        else:
            unfinished += [file.stem for file in group]
    failed = any(one["failed"] for one in found.values()) or not any(one["passed"] for one in found.values())
    part.write({"status": "failed" if failed or unfinished else "passed", "files": found, "unfinished": unfinished})


def _start(files: list[Path], report: Path, rehearsal: bool) -> subprocess.Popen:
    chosen = ["-k", _IN_A_REHEARSAL] if rehearsal else []
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junit-xml={report}",
        *chosen,
        *map(str, files),
    ]
    return subprocess.Popen(command, cwd=FOLDER.parents[2])  # what it says goes to the part's log


def _read(report: Path, found: dict) -> None:
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        own = found[case.get("classname", "").rpartition(".")[2]]
        fault = case.find("failure") if case.find("failure") is not None else case.find("error")
        kind = "failed" if fault is not None else "skipped" if case.find("skipped") is not None else "passed"
        own[kind] += 1
        if fault is not None:
            own["failures"].append(f"{case.get('name')}: {(fault.get('message') or '')[:300]}")


if __name__ == "__main__":
    main()
