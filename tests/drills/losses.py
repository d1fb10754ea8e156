"""Losses under load: a unit of two ranks and a separate drafter at saturation, with aborts, kills and stalls at random.

    python tests/drills/losses.py --minutes 10

Every finished output is compared with its solo run in one process; at the end pages, requests, memory and file handles must be
back where they were. Exits with 1 when anything was lost, doubled or foreign. Prints one line of JSON with what happened.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
CONCURRENCY = 16
SETTINGS = {
    "dtype": "float32",
    "max_num_seqs": CONCURRENCY,
    "seed": 7,
    "tensor_parallel_size": 2,
    "drafter_placement": "separate",
    "step_timeout_s": 20,
    "num_kv_pages": 400,
}
NAME = "losses"


def workload(seed):
    """Forty requests: greedy and sampled ones, short and long."""
    import dflash2_ray

    kinds = json.loads((Path(dflash2_ray.__file__).parent / "assets" / "prompts.json").read_text(encoding="utf-8"))
    texts = [text for group in kinds.values() for text in group]
    draw = random.Random(seed)
    rows = []
    for index, text in enumerate(draw.sample(texts, 40)):
        sampling = {"temperature": 0.0} if index % 2 == 0 else {"temperature": 0.8, "seed": index}
        rows.append((text, {"max_tokens": draw.choice([8, 32, 96]), "ignore_eos": True, **sampling}))
    return rows


def expected_tokens(rows):
    from dflash2_ray import LLM

    engine = LLM(dtype="float32", max_num_seqs=1, seed=7)
    tokens = [engine.generate(text, **sampling)[0].token_ids for text, sampling in rows]
    engine.close()
    return tokens


class Losses:
    def __init__(self, client, rows, expected, seconds, seed):
        self.client, self.rows, self.expected = client, rows, expected
        self.until = time.monotonic() + seconds
        self.draw = random.Random(seed)
        self.counts = Counter()
        self.wrong = []

    async def worker(self):
        while time.monotonic() < self.until:
            index = self.draw.randrange(len(self.rows))
            text, sampling = self.rows[index]
            leave_after = self.draw.randrange(1, 20) if self.draw.random() < 0.15 else None
            tokens, stream = [], self.client.astream(text, **sampling)
            try:
                async for chunk in stream:
                    tokens += chunk.token_ids
                    if chunk.generation is not None:
                        self.counts["resumes"] += chunk.generation.metrics["num_resumes"]
                        stats = chunk.generation.metrics["speculative_decoding"]
                        self.counts["accepted"] += stats["num_accepted_draft_tokens"]
                    if leave_after is not None and len(tokens) >= leave_after:
                        break
                else:
                    leave_after = None
            except Exception as error:
                self.counts[f"error {type(error).__name__}"] += 1
                self.wrong.append(f"{text[:30]!r}: {type(error).__name__}: {error}")
                continue
            finally:
                await stream.aclose()
            self.counts["aborted" if leave_after is not None else "finished"] += 1
            self.counts["tokens"] += len(tokens)
            reference = self.expected[index]
            if tokens != (reference if leave_after is None else reference[: len(tokens)]):
                self.wrong.append(f"{text[:30]!r} {sampling}: other tokens than its solo run")

    async def trouble(self):
        """Every 15 to 40 s something dies or stalls."""
        while time.monotonic() < self.until - 30:
            await asyncio.sleep(self.draw.uniform(15, 40))
            try:
                info = await self.client.describe()
            except Exception:  # it is already down
                continue
            pids = {row["role"]: row["pid"] for row in info["workers"]}
            kind = self.draw.choice(["kill", "kill", "stall", "stall", "stall"])
            victim = self.draw.choice(["drafter", "drafter", "target rank 0", "target rank 1", "unit"])
            if victim not in pids:
                continue
            self.counts[f"{kind} {victim}"] += 1
            try:
                if kind == "kill":
                    os.kill(pids[victim], signal.SIGKILL)
                else:
                    os.kill(pids[victim], signal.SIGSTOP)
                    await asyncio.sleep(self.draw.uniform(0.2, 3))
                    os.kill(pids[victim], signal.SIGCONT)
            except ProcessLookupError:
                continue

    async def run(self):
        await asyncio.gather(self.trouble(), *(self.worker() for _ in range(CONCURRENCY)))


async def settled(client, patience_s=180):
    """The description once nothing runs and nothing is missing."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            info = await client.describe()
            if info["degraded"] == [] and info["num_requests_running"] == info["num_requests_in_flight"] == 0:
                return info
        except Exception as error:
            info = error
        if time.monotonic() > deadline:
            raise SystemExit(f"not settled after {patience_s} s: {info}")
        await asyncio.sleep(0.5)


def resources(info):
    """Resident MiB and open files of every process of the unit, by role."""
    found = {}
    for row in info["workers"]:
        status = Path(f"/proc/{row['pid']}/status").read_text()
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        found[row["role"]] = {"rss_mib": resident // 1024, "files": len(os.listdir(f"/proc/{row['pid']}/fd"))}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    import ray
    from ray import serve

    from dflash2_ray import Client
    from dflash2_ray.app import app
    from dflash2_ray.config import ServiceConfig

    rows = workload(asked.seed)
    expected = expected_tokens(rows)
    ray.init(address="local", include_dashboard=False, num_cpus=4, object_store_memory=100 * 2**20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": 0}, proxy_location="Disabled")
    serve.run(app(ServiceConfig(**SETTINGS)), name=NAME)
    client = Client(NAME)
    losses = Losses(client, rows, expected, asked.minutes * 60, asked.seed)

    async def all_of_it():
        before = await settled(client)
        await losses.run()
        return before, await settled(client)

    before, after = asyncio.run(all_of_it())
    report = {
        "minutes": asked.minutes,
        "concurrency": CONCURRENCY,
        **dict(losses.counts),
        "wrong": losses.wrong[:20],
        "num_wrong": len(losses.wrong),
        "pages_free": [after["num_free_pages"], after["num_pages"]],
        "resources_before": resources(before) if before["workers"] == after["workers"] else "other processes",
        "resources_after": resources(after),
        "num_rebuilds": after["num_rebuilds"],
        "num_drafter_restarts": after["num_drafter_restarts"],
    }
    print(json.dumps(report))
    serve.shutdown()
    ray.shutdown()
    sys.exit(bool(losses.wrong) or after["num_free_pages"] != after["num_pages"])


if __name__ == "__main__":
    main()
