"""What the way through Ray and HTTP costs: tokens per second of the service against `LLM` in one process, in turns.

    python deploy/http_overhead.py [--new-tokens 128] [KEY=VALUE …]     settings of both, e.g. target=smollm2 (default: the embedded pair)
    RAY_SERVE_ENABLE_HA_PROXY=1 python deploy/http_overhead.py          the same behind Serve's HAProxy instead of its Python proxy

Starts a local Ray with the service on a free port; the client is this process. Ratios of turns that follow each other are
compared by their median, because machines drift.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import time
from collections.abc import Awaitable, Callable

import httpx

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0",
}

CONCURRENCY = 16
NUM_PROMPTS = 48
REPEATS = 5


def start_service(settings: dict) -> str:
    """Its URL."""
    import ray
    from ray import serve

    from dflash2_ray.app import app
    from dflash2_ray.config import ServiceConfig

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(address="local", include_dashboard=False, num_cpus=4, object_store_memory=100 * 2**20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(ServiceConfig.from_keys(settings)), name="default")
    return f"http://127.0.0.1:{port}"


async def rate_of(one: Callable[[list[int]], Awaitable[int]], ids: list[list[int]]) -> float:
    """Tokens per second of `one(prompt)`, CONCURRENCY at a time."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def in_turn(prompt: list[int]) -> int:
        async with gate:
            return await one(prompt)

    started = time.perf_counter()
    counts = await asyncio.gather(*(in_turn(prompt) for prompt in ids))
    return sum(counts) / (time.perf_counter() - started)


async def over_http(url: str, ids: list[list[int]], new_tokens: int, stream: bool) -> float:
    """Tokens per second over HTTP."""
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=CONCURRENCY)) as client:

        async def one(prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
            if not stream:
                return (await client.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"]
            last = ""
            async with client.stream("POST", "/v1/completions", json={**body, "stream_options": {"include_usage": True}}) as answer:
                async for line in answer.aiter_lines():
                    if line and line != "data: [DONE]":
                        last = line
            return json.loads(last[6:])["usage"]["completion_tokens"]

        return await rate_of(one, ids)


async def by_client(client, ids: list[list[int]], new_tokens: int) -> float:
    """Tokens per second by Ray and without HTTP."""

    async def one(prompt: list[int]) -> int:
        (result,) = await client.agenerate(prompt_token_ids=prompt, temperature=0, max_tokens=new_tokens, ignore_eos=True)
        return len(result.token_ids)

    return await rate_of(one, ids)


def in_process(engine, ids: list[list[int]], new_tokens: int) -> float:
    """Tokens per second with CONCURRENCY requests in flight."""
    started = time.perf_counter()
    results = engine.generate(prompt_token_ids=ids, max_in_flight=CONCURRENCY, temperature=0, max_tokens=new_tokens, ignore_eos=True)
    return sum(len(one.token_ids) for one in results) / (time.perf_counter() - started)


def main() -> None:
    """Print the median rates and the medians of the ratios to `LLM`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=128, help="length of every answer")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    new_tokens = asked.new_tokens
    os.environ.update({**ENVIRONMENT, **os.environ})  # before torch and ray look at it
    import ray
    from ray import serve

    from dflash2_ray import LLM, Client
    from dflash2_ray.cli.settings import prompt_ids, read_prompts, read_settings

    settings = {"draft_width": "fixed", "enable_prefix_caching": False, **read_settings(asked.settings), "max_num_seqs": CONCURRENCY}
    engine = LLM(**settings)
    some = prompt_ids(engine, [one for one in read_prompts(None) if one[0] == "chat"], new_tokens)
    ids = [some[index % len(some)] for index in range(NUM_PROMPTS)]
    url = start_service(settings)
    client = Client()
    ways = {
        "LLM": lambda: in_process(engine, ids, new_tokens),
        "Client": lambda: asyncio.run(by_client(client, ids, new_tokens)),
        "HTTP, whole": lambda: asyncio.run(over_http(url, ids, new_tokens, False)),
        "HTTP, streamed": lambda: asyncio.run(over_http(url, ids, new_tokens, True)),
    }
    for way in ways.values():
        way()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            rates[name].append(way())
    for name, some_rates in rates.items():
        ratio = statistics.median(one / base for one, base in zip(some_rates, rates["LLM"], strict=True))
        print(f"{name}: {statistics.median(some_rates):.0f} tokens/s, {ratio:.3f} of LLM")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
