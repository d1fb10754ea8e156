"""A burst of ten times what the service can take: who gets an answer, how late, and what it costs the others.

    python tests/drills/burst.py [--times 10] [--seconds 20] [--new-tokens 256] [KEY=VALUE …]

Starts a local Ray with the service on a free port. First a full batch without a queue (the uncongested figure), then a full queue
(the peak), then the burst: requests that come at their own pace, whatever becomes of those before; last, as many patient clients as would fill
all places so many times, who ask again when Retry-After says so. Prints the figures, and exits with 1 when a request got anything but its
answer or a clean 429 with Retry-After, when health failed or a process was replaced.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass

from light_http import LightHttp
from local_service import local_service

SETTINGS = {"max_num_seqs": "8", "max_queued_requests": "8"}


@dataclass
class Answer:
    """begun, ended: seconds of the monotonic clock. outcome: "answered", "429" or what was wrong. wait_s: what a 429 asks for."""

    begun: float
    ended: float
    outcome: str
    wait_s: float = 0.0


class Load:
    def __init__(self, http, new_tokens):
        self._http, self._new_tokens = http, new_tokens
        self._numbers = itertools.count()

    async def one(self):
        body = {
            "prompt": f"Once upon a time there were {next(self._numbers)} birds",
            "max_tokens": self._new_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        begun, wait_s = time.monotonic(), 0.0
        try:
            status, headers, answer = await self._http.ask("POST", "/v1/completions", body)
            outcome, wait_s = self._outcome(status, headers, json.loads(answer))
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        return Answer(begun, time.monotonic(), outcome, wait_s)

    def _outcome(self, status, headers, body):
        if status == 200:
            got = body["usage"]["completion_tokens"]
            return "answered" if got == self._new_tokens else f"{got} tokens", 0.0
        retry_after = headers.get("retry-after", "")
        if status == 429 and body["error"]["code"] == "queue_full" and retry_after.isdigit() and int(retry_after) >= 1:
            return "429", int(headers["retry-after-ms"]) / 1000
        return f"{status} {body} Retry-After: {retry_after!r}", 0.0

    async def closed(self, in_flight, seconds):
        """Answers of `in_flight` clients that ask again at once, or when they were told to."""
        until = time.monotonic() + seconds

        async def client():
            answers = []
            while time.monotonic() < until:
                answers.append(await self.one())
                if answers[-1].wait_s:
                    await asyncio.sleep(min(answers[-1].wait_s, until - time.monotonic()))
            return answers

        return [answer for answers in await asyncio.gather(*(client() for _ in range(in_flight))) for answer in answers]

    async def open(self, per_second, seconds):
        """Answers to requests that come at random, `per_second` on the mean."""
        draw, tasks, at = random.Random(1), [], time.monotonic()
        until = at + seconds
        while (at := at + draw.expovariate(per_second)) < until:
            await asyncio.sleep(at - time.monotonic())
            tasks.append(asyncio.create_task(self.one()))
        return await asyncio.gather(*tasks)


def rate(answers):
    """Answers per second while the load lasted, its first fifth left out."""
    first, last = min(one.begun for one in answers), max(one.begun for one in answers)
    start = first + (last - first) / 5
    return sum(one.outcome == "answered" and start <= one.ended < last for one in answers) / (last - start)


def latencies(answers, outcome="answered"):
    """(median, p99) in seconds of those with that outcome; zeros without one."""
    ordered = sorted(one.ended - one.begun for one in answers if one.outcome == outcome) or [0.0]
    return ordered[len(ordered) // 2], ordered[math.ceil(len(ordered) * 0.99) - 1]


def processes(info):
    return {row["role"]: row["pid"] for row in info["workers"]}


async def drill(url, config, asked):
    http = LightHttp(url)
    load, batch, places = (
        Load(http, asked.new_tokens),
        config.max_num_seqs,
        config.max_num_seqs + config.max_queued_requests,
    )
    await load.closed(batch, 3)
    before = json.loads((await http.ask("GET", "/server_info"))[2])
    calm = await load.closed(batch, asked.seconds)
    full = await load.closed(places, asked.seconds)
    capacity = max(rate(calm), rate(full))
    health, over = Counter(), asyncio.Event()

    async def watch():
        while not over.is_set():
            for path in ("/health", "/ready"):
                status, _, _ = await http.ask("GET", path)
                health[f"{path} {status}"] += 1
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    burst = await load.open(capacity * asked.times, asked.seconds)
    patient = await load.closed(round(places * asked.times), asked.seconds)
    over.set()
    await watching
    after = json.loads((await http.ask("GET", "/server_info"))[2])
    http.close()
    print(
        f"{batch} at once, {config.max_queued_requests} may wait, {asked.new_tokens} tokens an answer, {asked.seconds:g} s each"
    )
    loads = {
        "a full batch": calm,
        "and a full queue": full,
        f"a burst of {asked.times:g} times that": burst,
        f"{asked.times:g} patient clients a place": patient,
    }
    for name, answers in loads.items():
        median, late = latencies(answers)
        refusals = (
            f", refusals after {latencies(answers, '429')[0] * 1000:.0f} ms"
            if any(one.outcome == "429" for one in answers)
            else ""
        )
        print(
            f"{name}: {rate(answers):.2f} answers/s, median {median:.2f} s, p99 {late:.2f} s{refusals}; {dict(Counter(one.outcome for one in answers))}"
        )
    for name, answers in (("burst", burst), ("patient clients", patient)):
        print(
            f"{name}: p99 of admitted requests / of a full batch {latencies(answers)[1] / latencies(calm)[1]:.2f}, goodput / peak {rate(answers) / capacity:.2f}"
        )
    print(f"health meanwhile: {dict(health)}")
    same = processes(before) == processes(after) and before["num_rebuilds"] == after["num_rebuilds"]
    print("no process was replaced" if same else f"replaced: {processes(before)} -> {processes(after)}")
    right = {one.outcome for one in (*calm, *full, *burst, *patient)} <= {"answered", "429"}
    return right and same and set(health) == {"/health 200", "/ready 200"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    with local_service(SETTINGS | dict(one.split("=", 1) for one in asked.settings)) as (url, config):
        good = asyncio.run(drill(url, config, asked))
    sys.exit(not good)


if __name__ == "__main__":
    main()
