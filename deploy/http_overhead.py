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
from typing import Any

import aiohttp

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
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


async def rate_of(one: Callable[[list[int]], Awaitable[int]], ids: list[list[int]], concurrency: int) -> float:
    """Tokens per second of `one(prompt)`, so many at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def in_turn(prompt: list[int]) -> int:
        async with gate:
            return await one(prompt)

    started = time.perf_counter()
    counts = await asyncio.gather(*(in_turn(prompt) for prompt in ids))
    return sum(counts) / (time.perf_counter() - started)


async def over_http(url: str, ids: list[list[int]], new_tokens: int, concurrency: int, stream: bool) -> float:
    """Tokens per second over HTTP."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(300), raise_for_status=True) as http:

        async def one(prompt: list[int]) -> int:
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
            if stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            async with http.post("/v1/completions", json=body) as answer:
                if not stream:
                    return (await answer.json())["usage"]["completion_tokens"]
                last = b""
                async for piece in answer.content.iter_any():
                    last = last[-4096:] + piece
            events = last.decode(errors="replace").split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""], events
            return json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"]

        return await rate_of(one, ids, concurrency)


async def by_client(client: Any, ids: list[list[int]], new_tokens: int, concurrency: int) -> float:
    """Tokens per second by Ray and without HTTP."""

    async def one(prompt: list[int]) -> int:
        (result,) = await client.agenerate(
            prompt_token_ids=prompt, temperature=0, max_tokens=new_tokens, ignore_eos=True
        )
        return len(result.token_ids)

    return await rate_of(one, ids, concurrency)


def in_process(engine: Any, ids: list[list[int]], new_tokens: int, concurrency: int) -> float:
    """Tokens per second with so many requests in flight."""
    started = time.perf_counter()
    results = engine.generate(
        prompt_token_ids=ids, max_in_flight=concurrency, temperature=0, max_tokens=new_tokens, ignore_eos=True
    )
    return sum(len(one.token_ids) for one in results) / (time.perf_counter() - started)


def measure(
    engine: Any, client: Any, url: str, ids: list[list[int]], new_tokens: int, concurrency: int, repeats: int
) -> dict[str, list[float]]:
    """Tokens per second of every way, in turns, behind one turn that warms up."""
    ways: dict[str, Callable[[], float]] = {
        "LLM": lambda: in_process(engine, ids, new_tokens, concurrency),
        "Client": lambda: asyncio.run(by_client(client, ids, new_tokens, concurrency)),
        "HTTP, whole": lambda: asyncio.run(over_http(url, ids, new_tokens, concurrency, False)),
        "HTTP, streamed": lambda: asyncio.run(over_http(url, ids, new_tokens, concurrency, True)),
    }
    turns = [{name: way() for name, way in ways.items()} for _ in range(1 + repeats)]
    return {name: [turn[name] for turn in turns[1:]] for name in ways}


def main() -> None:
    """Print the median rates and the medians of the ratios to `LLM`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=128, help="length of every answer")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    os.environ.update({**ENVIRONMENT, **os.environ})  # before torch and ray look at it
    import ray
    from ray import serve

    from dflash2_ray import LLM, Client
    from dflash2_ray.cli.settings import prompt_ids, read_prompts, read_settings

    settings = {
        "draft_width": "fixed",
        "enable_prefix_caching": False,
        **read_settings(asked.settings),
        "max_num_seqs": CONCURRENCY,
    }
    engine = LLM(**settings)
    some = prompt_ids(engine, [one for one in read_prompts(None) if one[0] == "chat"], asked.new_tokens)
    ids = [some[index % len(some)] for index in range(NUM_PROMPTS)]
    url = start_service(settings)
    rates = measure(engine, Client(), url, ids, asked.new_tokens, CONCURRENCY, REPEATS)
    for name, some_rates in rates.items():
        ratio = statistics.median(one / base for one, base in zip(some_rates, rates["LLM"], strict=True))
        print(f"{name}: {statistics.median(some_rates):.0f} tokens/s, {ratio:.3f} of LLM")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
