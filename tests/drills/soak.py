"""A soak at saturation with a peer's load generator: rounds of `vllm bench serve`, and what every process holds after each.

    tests/conformance/run --only vllm                       # makes .venv-conformance/vllm
    python tests/drills/soak.py --minutes 15 [--client .venv-conformance/vllm/bin/python] [KEY=VALUE …]

Twice as many requests are in flight as fit into a step. The first round warms up. After each of the others, at rest: every page is free, no
request is left, the counters grew by what the generator sent, and each process has the memory and the open files that it had after the first,
but for a slack. Prints a row per round and one line of JSON; exits with 1 when something grew or a request failed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from local_service import local_service

ROOT = Path(__file__).parents[2]
SETTINGS = {"max_num_seqs": "8", "max_queued_requests": "32"}
MODEL, NEW_TOKENS = "dflash2-embedded", 96
GROWN_MIB, GROWN_SHARE, GROWN_FILES = 24, 0.05, 8  # what a process may hold more at the end
OURS = ("ray::ServeReplica", "ray::ProxyActor", "ray::ServeController", "ray::TargetRank", "ray::Drafter")


def holdings():
    """Memory (resident MiB) and open files of this service's processes, by name and process id."""
    import ray  # noqa: F401  (brings psutil)
    from ray._private.utils import psutil

    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            name = re.split(r"[.\s]", " ".join(process.cmdline()))[0]
            if name.startswith(OURS):
                found[f"{name.removeprefix('ray::')} {process.pid}"] = (
                    process.memory_info().rss / 2**20,
                    process.num_fds(),
                )
        except psutil.NoSuchProcess:
            continue
    return found


def at_rest(http):
    """/server_info once nothing runs and nobody waits."""
    deadline = time.monotonic() + 60
    while True:
        info = http.get("/server_info").raise_for_status().json()
        if info["num_requests_running"] == info["num_requests_waiting"] == info["num_requests_in_flight"] == 0:
            return info
        if time.monotonic() > deadline:
            raise SystemExit(f"requests are left: {info}")
        time.sleep(0.1)


def bench(client, url, prompts, num_prompts, concurrency, log):
    """One round; (requests answered, tokens per second) as the generator printed them."""
    words = [
        client,
        str(ROOT / "tests/conformance/vllm_bench.py"),
        "--backend",
        "openai-chat",
        "--endpoint",
        "/v1/chat/completions",
    ]
    words += [
        "--base-url",
        url,
        "--model",
        MODEL,
        "--tokenizer",
        str(ROOT / "dflash2_ray/assets/target"),
        "--dataset-name",
        "custom",
    ]
    words += [
        "--dataset-path",
        str(prompts),
        "--skip-chat-template",
        "--custom-output-len",
        str(NEW_TOKENS),
        "--temperature",
        "0",
    ]
    words += [
        "--num-prompts",
        str(num_prompts),
        "--max-concurrency",
        str(concurrency),
        "--disable-tqdm",
        "--ignore-eos",
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    log.write(done.stdout + done.stderr)
    log.flush()
    if done.returncode:
        raise SystemExit(f"vllm bench serve failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    figure = dict(re.findall(r"(Successful requests|Output token throughput \(tok/s\)): +([\d.]+)", done.stdout))
    return int(figure["Successful requests"]), float(figure["Output token throughput (tok/s)"])


def soak(url, asked, concurrency, folder):
    texts = json.loads((ROOT / "dflash2_ray/assets/prompts.json").read_text(encoding="utf-8"))["chat"]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    rounds, until = [], time.monotonic() + asked.minutes * 60
    with httpx.Client(base_url=url, timeout=60) as http, open(folder / "bench.log", "w") as log:
        before = at_rest(http)
        while time.monotonic() < until or len(rounds) < 3:
            answered, rate = bench(asked.client, url, prompts, asked.num_prompts, concurrency, log)
            info = at_rest(http)
            rounds.append(
                {
                    "answered": answered,
                    "tokens_per_s": rate,
                    "processes": holdings(),
                    "pages": [info["num_free_pages"], info["num_pages"]],
                    "requests": info["num_requests_by_line"] - before["num_requests_by_line"],
                    "cancelled": info["num_requests_cancelled"] - before["num_requests_cancelled"],
                    "rebuilds": info["num_rebuilds"],
                }
            )
            before = info
            held = "; ".join(
                f"{name} {mib:.0f} MiB {files} files" for name, (mib, files) in rounds[-1]["processes"].items()
            )
            print(f"round {len(rounds)}: {answered} answers, {rate:.0f} tokens/s; {held}", flush=True)
    return rounds


def wrongs(rounds):
    """What was not flat, in words; the first round only warms up."""
    settled = rounds[1]
    for number, one in enumerate(rounds, 1):
        if one["pages"][0] != one["pages"][1]:
            yield f"round {number}: pages free {one['pages'][0]} of {one['pages'][1]}"
        if one["cancelled"] or one["rebuilds"]:
            yield f"round {number}: {one['cancelled']} cancelled, {one['rebuilds']} rebuilds"
        if (one["answered"], one["requests"]) != (settled["answered"], settled["requests"]):
            yield f"round {number}: {one['answered']} answered and {one['requests']} counted, in round 2 {settled['answered']} and {settled['requests']}"
        if one["processes"].keys() != settled["processes"].keys():
            yield f"round {number}: other processes than in round 2"
    for name, (mib, files) in settled["processes"].items():
        last_mib, last_files = rounds[-1]["processes"].get(name, (mib, files))
        if last_mib - mib > max(GROWN_MIB, GROWN_SHARE * mib):
            yield f"{name}: {mib:.0f} -> {last_mib:.0f} MiB"
        if last_files - files > GROWN_FILES:
            yield f"{name}: {files} -> {last_files} open files"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--num-prompts", type=int, default=600, help="of a round")
    parser.add_argument(
        "--client", default=str(ROOT / ".venv-conformance/vllm/bin/python"), help="a Python that has vLLM's benchmark"
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    if not Path(asked.client).is_file():
        raise SystemExit(f"{asked.client} is not there: tests/conformance/run --only vllm makes it")
    settings = SETTINGS | dict(one.split("=", 1) for one in asked.settings)
    with tempfile.TemporaryDirectory() as folder, local_service(settings) as (url, config):
        rounds = soak(url, asked, config.max_num_seqs * 2, Path(folder))
    wrong = list(wrongs(rounds))
    answered, rates = sum(one["answered"] for one in rounds), [one["tokens_per_s"] for one in rounds]
    print(
        json.dumps(
            {
                "rounds": len(rounds),
                "answered": answered,
                "tokens_per_s": [min(rates), max(rates)],
                "pages": rounds[-1]["pages"],
                "wrong": wrong,
            }
        )
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
