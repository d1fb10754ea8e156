"""How long a loss lasts: every member of a unit is killed once while eight streams run; what their clients see.

    python deploy/loss_times.py [KEY=VALUE …]

Starts a Ray of its own on this machine, with a unit of two ranks and a separate drafter on the embedded pair unless told
otherwise. Prints a row per member: streams whole and right, the longest silence that a client saw, how long the rebuild took.
"""

import asyncio
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
SETTINGS = {
    "tensor_parallel_size": "2",
    "drafter_placement": "separate",
    "max_num_seqs": "8",
    "num_kv_pages": "1200",
    "dtype": "float32",
}
NUM_STREAMS, NUM_TOKENS = 8, 400
VICTIMS = ("drafter", "target rank 1", "target rank 0", "unit")


@dataclass(frozen=True)
class Loss:
    """num_right: streams that ended with the undisturbed run's tokens. gaps_s: the longest silence of each stream. took_s: what the unit
    says its rebuild took. whole_s: from the kill until nothing is missing and nothing runs."""

    victim: str
    num_right: int
    gaps_s: list[float]
    took_s: float | None
    whole_s: float


async def run(client, num_tokens, on_start=None):
    """(tokens, longest silence in seconds) of every stream."""
    started = asyncio.Event()

    async def one(index):
        tokens, longest, last = [], 0.0, None
        prompt = f"Once upon a time there were {index + 2} birds"
        async for chunk in client.astream(prompt, temperature=0, max_tokens=num_tokens, ignore_eos=True):
            now = time.perf_counter()
            longest = max(longest, now - last) if last is not None else 0.0
            last = now
            tokens += chunk.token_ids
            if len(tokens) > num_tokens // 10:
                started.set()
        return tokens, longest

    streams = [asyncio.ensure_future(one(index)) for index in range(NUM_STREAMS)]
    if on_start is not None:
        await started.wait()
        on_start()
    return await asyncio.gather(*streams)


async def settled(client):
    while True:
        try:
            info = await client.describe()
            if not info["degraded"] and info["num_requests_in_flight"] == 0:
                return info
        except Exception:  # nothing is ready yet
            pass
        await asyncio.sleep(0.2)


async def measure(client, victims=VICTIMS, num_tokens=NUM_TOKENS):
    """(longest silence of every stream while nothing dies, a `Loss` for every victim that the unit has)."""
    undisturbed = await run(client, num_tokens)
    expected = [tokens for tokens, _ in undisturbed]
    losses = []
    for victim in victims:
        info = await settled(client)
        pid = next((row["pid"] for row in info["workers"] if row["role"] == victim), None)
        if pid is None:
            continue
        killed_at = 0.0

        def kill(pid=pid):
            nonlocal killed_at
            killed_at = time.perf_counter()
            os.kill(pid, signal.SIGKILL)

        results = await run(client, num_tokens, kill)
        after = await settled(client)
        whole_s = time.perf_counter() - killed_at
        num_right = sum(tokens == one for (tokens, _), one in zip(results, expected, strict=True))
        took_s = {"drafter": after["last_drafter_restart_s"]}.get(victim, after["last_rebuild_s"])
        losses.append(Loss(victim, num_right, [gap for _, gap in results], took_s, whole_s))
    return [gap for _, gap in undisturbed], losses


def report(undisturbed_s, losses):
    """Print a row for each."""
    print(f"nothing dies: longest silence {max(undisturbed_s) * 1000:.0f} ms")
    for loss in losses:
        print(
            f"{loss.victim}: {loss.num_right}/{NUM_STREAMS} streams whole and right; silence at clients median {statistics.median(loss.gaps_s):.2f} s, "
            f"longest {max(loss.gaps_s):.2f} s; rebuilt in {'-' if loss.took_s is None else f'{loss.took_s:.1f} s'}; "
            f"whole again and idle after {loss.whole_s:.1f} s"
        )


def main():
    import ray
    from ray import serve

    from dflash2_ray import Client
    from dflash2_ray.app import app
    from dflash2_ray.cli.settings import read_settings
    from dflash2_ray.config import ServiceConfig

    config = ServiceConfig.from_keys({**SETTINGS, **read_settings(sys.argv[1:])})
    ray.init(address="local", include_dashboard=False, num_cpus=4, object_store_memory=100 * 2**20, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    serve.run(app(config), name="losses")
    report(*asyncio.run(measure(Client("losses"))))
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
