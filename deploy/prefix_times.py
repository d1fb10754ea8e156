"""What the prefix cache is worth, with against without, in turns in one process.

    python deploy/prefix_times.py [--target embedded] [--prefix 400] [--repeats 7] [--tokens 48]

Prints one line of JSON. `ttft_ms`: first token of a request whose first `prefix` tokens an earlier one had, medians over repeats.
`tokens_per_s`: of prompts that share nothing, each asked once, 8 in flight in a full pool; `shared_tokens_per_s`: of prompts that share
their first `prefix` tokens, 8 in flight. Ratios are medians over turns.
"""

import argparse
import json
import os
import random
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--prefix", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=48, help="new ones of every request of which tokens/s are taken")
    parser.add_argument("--ttft-only", action="store_true")
    asked = parser.parse_args()
    from dflash2_ray import LLM

    # few pages, so that idle ones fill the pool and are evicted in every turn
    settings = {
        "target": asked.target,
        "seed": 1,
        "draft_width": "fixed",
        "max_num_seqs": 8,
        "max_model_len": 768,
        "num_kv_pages": 480,
    }
    engines = {"on": LLM(**settings), "off": LLM(**settings, enable_prefix_caching=False)}
    chance = random.Random(5)

    def tokens(count):
        return [chance.randrange(3, 1500) for _ in range(count)]

    def timed(engine, prompts, max_tokens):
        started = time.perf_counter()
        results = engines[engine].generate(
            prompt_token_ids=prompts, max_tokens=max_tokens, temperature=0, ignore_eos=True
        )
        return time.perf_counter() - started, results

    first = {"on": [], "off": []}
    alone = {"on": [], "off": []}
    shared = {"on": [], "off": []}
    for turn in range(asked.repeats + 1):  # the first one compiles
        prefix = tokens(asked.prefix)
        begun, second = [*prefix, *tokens(8)], [*prefix, *tokens(8)]
        strangers = [tokens(chance.randint(40, 200)) for _ in range(24)]
        company = [[*prefix, *tokens(8)] for _ in range(8)]
        for engine in ("on", "off") if turn % 2 else ("off", "on"):
            timed(engine, [begun], 1)
            seconds, (result,) = timed(engine, [second], 1)
            assert (result.usage.cached_tokens > 0) == (engine == "on")
            if turn:
                first[engine].append(seconds)
            if asked.ttft_only:
                continue
            spent = timed(engine, strangers, asked.tokens)[0]
            together = timed(engine, company, asked.tokens)[0]
            if turn:
                alone[engine].append(24 * asked.tokens / spent)
                shared[engine].append(8 * asked.tokens / together)

    def ratio(found):
        return round(statistics.median(on / off for on, off in zip(found["on"], found["off"], strict=True)), 3)

    def told(found, digits=1, scale=1.0):
        return {engine: round(statistics.median(values) * scale, digits) for engine, values in found.items()} | {
            "ratio": ratio(found)
        }

    rates = {} if asked.ttft_only else {"tokens_per_s": told(alone), "shared_tokens_per_s": told(shared)}
    print(json.dumps({"target": asked.target, "prefix": asked.prefix, "ttft_ms": told(first, 2, 1000), **rates}))


if __name__ == "__main__":
    main()
