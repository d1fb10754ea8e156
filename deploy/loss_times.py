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

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
SETTINGS = {"tensor_parallel_size": "2", "drafter_placement": "separate", "max_num_seqs": "8", "num_kv_pages": "1200", "dtype": "float32"}
NUM_STREAMS, NUM_TOKENS = 8, 400


async def run(client, on_start=None):
    """(tokens, longest silence in seconds) of every stream."""
    started = asyncio.Event()

    async def one(index):
        tokens, longest, last = [], 0.0, None
        prompt = f"Once upon a time there were {index + 2} birds"
        async for chunk in client.astream(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True):
            now = time.perf_counter()
            longest = max(longest, now - last) if last is not None else 0.0
            last = now
            tokens += chunk.token_ids
            if len(tokens) > 40:
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


async def measure(client):
    undisturbed = await run(client)
    expected = [tokens for tokens, _ in undisturbed]
    print(f"nothing dies: longest silence {max(gap for _, gap in undisturbed) * 1000:.0f} ms")
    for victim in ("drafter", "target rank 1", "target rank 0", "unit"):
        info = await settled(client)
        pid = next((row["pid"] for row in info["workers"] if row["role"] == victim), None)
        if pid is None:
            continue
        killed_at = 0.0

        def kill(pid=pid):
            nonlocal killed_at
            killed_at = time.perf_counter()
            os.kill(pid, signal.SIGKILL)

        results = await run(client, kill)
        right = sum(tokens == one for (tokens, _), one in zip(results, expected, strict=True))
        after = await settled(client)
        whole_again = time.perf_counter() - killed_at
        gaps = [gap for _, gap in results]
        took = {"drafter": after["last_drafter_restart_s"]}.get(victim, after["last_rebuild_s"])
        print(
            f"{victim}: {right}/{NUM_STREAMS} streams whole and right; silence at clients median {statistics.median(gaps):.2f} s, "
            f"longest {max(gaps):.2f} s; rebuilt in {'-' if took is None else f'{took:.1f} s'}; whole again and idle after {whole_again:.1f} s"
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
    asyncio.run(measure(Client("losses")))
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
