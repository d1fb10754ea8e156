"""Part: on this device speculative decoding gives the tokens of plain decoding, with a trained pair, so that drafts are accepted.

fp32: every token. A first difference passes only at a tie (the plain margin between the two likeliest tokens is at most 0.001), and is
counted. The drafter is in the process, and behind a socket. Where graphs are used, the same without them.
"""

import json
from pathlib import Path
from typing import Any

from loops import add, has_graphs, launch_by_launch, running_loop, step
from part_script import PartScript

import dflash2_ray
from dflash2_ray.runtime.target_loop import TargetLoop
from dflash2_ray.text.tokenizer import Tokenizer

_TIE = 0.001
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 0.8, "seed": 7},
    "cut": {"temperature": 1.0, "seed": 8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
}


def main() -> None:
    part = PartScript()
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"status": "failed", "placements": rows, "cut": []}
    for separate in (False, True):
        name = "separate" if separate else "colocated"
        if part.left_s < 5:
            result["cut"].append(name)
            continue
        rows.append({"placement": name, **_compare(part, separate)})
        part.write(result)
    held = [
        row["num_wrong"] == 0
        and not any(one["failure"] for one in row["graphs"].values())
        and row["acceptance_length"] is not None
        and row["acceptance_length"] > 1
        for row in rows
    ]
    result["status"] = "passed" if held and all(held) else "failed"
    part.write(result)


def _compare(part: PartScript, separate: bool) -> dict[str, Any]:
    num_prompts, num_tokens = (1, 6) if part.rehearsal else (12, 64)
    keys = {
        "target": "embedded", "dtype": "float32", "device": part.device, "max_model_len": 1024, "max_num_seqs": 16, "num_kv_pages": 1024,
        "seed": 0,
    }  # fmt: skip
    with running_loop(keys, separate=separate) as loop:
        texts = _prompts(num_prompts)
        drafted, _ = _run(loop, texts, num_tokens, speculative=True)
        acceptance = loop.spec_counters.acceptance_length
        plain, margins = _run(loop, texts, num_tokens, speculative=False)
        graphs = loop.describe()["cuda_graphs"]
        others = [drafted]
        if has_graphs(loop):
            with launch_by_launch(loop):
                others += [_run(loop, texts, num_tokens, speculative=speculative)[0] for speculative in (True, False)]
    wrong = ties = 0
    for name, tokens in plain.items():
        for other in others:
            first = next(
                (i for i, pair in enumerate(zip(tokens, other[name], strict=True)) if pair[0] != pair[1]), None
            )
            tied = first is not None and name in margins and margins[name][first] <= _TIE
            ties += tied
            wrong += first is not None and not tied
    return {
        "num_texts": len(plain) * len(others), "num_tokens": num_tokens, "num_wrong": wrong, "num_ties": ties, "acceptance_length": acceptance,
        "num_runs": len(others) + 1, "graphs": graphs,
    }  # fmt: skip


def _run(
    loop: TargetLoop, texts: list[list[int]], num_tokens: int, *, speculative: bool
) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """(tokens, margins of greedy ones) by request, all requests at once."""
    loop.control.force(loop.control.max_width if speculative else 0)
    tokens: dict[str, list[int]] = {}
    margins: dict[str, list[float]] = {}
    for index, prompt in enumerate(texts):
        for kind, options in _KINDS.items():
            add(loop, f"{kind}-{index}", prompt, num_tokens, **options)
            tokens[f"{kind}-{index}"] = []
    while loop.has_work:
        for delta in step(loop):
            tokens[delta.request_id] += delta.token_ids
            for _, best in delta.logprobs or ():
                margins.setdefault(delta.request_id, []).append(best[0][1] - best[1][1])
    return tokens, margins


def _prompts(count: int) -> list[list[int]]:
    assets = Path(dflash2_ray.__file__).parent / "assets"
    kinds = json.loads((assets / "prompts.json").read_text())
    tokenizer = Tokenizer.from_folder(assets / "target")
    return [tokenizer.encode(text)[:200] for text in [one for texts in kinds.values() for one in texts][:count]]


if __name__ == "__main__":
    main()
