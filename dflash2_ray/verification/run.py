"""The checks that were asked for, one after the other."""

import time
from collections.abc import Callable, Collection, Sequence

from dflash2_ray.errors import ConfigError
from dflash2_ray.verification.answer import Prompt
from dflash2_ray.verification.backend import Backend
from dflash2_ray.verification.identity import NUM_RUNS, check_identity
from dflash2_ray.verification.law import check_law, num_draws
from dflash2_ray.verification.option_check import OptionCheck
from dflash2_ray.verification.report import Report

BOUNDS = {"float32": 1e-3}
REDUCED_BOUND = 0.5  # of other types
TOOLS_ROOM = 256  # tokens that the functions of the tool sets may take in a template
Progress = Callable[[str, float, float], None]


def run_checks(
    backend: Backend,
    prompts: Sequence[Prompt],
    *,
    checks: Collection[str],
    max_tokens: int,
    company: int,
    samples: int,
    law_prompts: int,
    option_prompts: int,
    margin: float | None,
    progress: Progress = lambda phase, done, total: None,
) -> Report:
    """progress(what is done now, done, total). Raises ConfigError when no prompt has room for an answer, or the service fails."""
    started = time.perf_counter()
    facts = backend.facts
    company = min(company, facts.max_num_seqs)
    bound = BOUNDS.get(facts.dtype, REDUCED_BOUND) if margin is None else margin
    counts = backend.num_tokens(prompts)
    fit = [
        prompt for prompt, count in zip(prompts, counts, strict=True) if 0 < count <= facts.max_model_len - max_tokens
    ]
    if not fit:
        raise ConfigError(
            f"prompts: none of {len(prompts)} leaves room for {max_tokens} tokens in {facts.max_model_len}"
        )
    roomy = {
        p
        for p, count in zip(prompts, counts, strict=True)
        if 0 < count <= facts.max_model_len - max_tokens - TOOLS_ROOM
    }
    drawn, optioned = spread(fit, law_prompts), spread([one for one in fit if one in roomy] or fit, option_prompts)
    left = {"identity": NUM_RUNS, "law": num_draws(len(drawn)), "options": 0}
    option_check = sets = None
    total = sum(left[check] for check in checks)
    done = -1

    def told(what: str) -> None:
        nonlocal done
        done += 1
        progress(what, done, max(total, done))

    if "options" in checks:
        option_check = OptionCheck(
            backend,
            optioned,
            max_tokens=max_tokens,
            in_flight=company,
            exact=facts.dtype == "float32",
            tolerance=bound,
            told=told,
        )
        sets = option_check.sets()
        total += len(sets)
    identity = laws = options = None
    if "identity" in checks:
        identity = check_identity(backend, fit, max_tokens=max_tokens, company=company, bound=bound, told=told)
    if "law" in checks:
        laws = tuple(check_law(backend, drawn, samples=samples, in_flight=company, told=told))
    if option_check is not None and sets is not None:
        options = option_check.run(sets)
    return Report(
        facts,
        len(fit),
        len(prompts) - len(fit),
        max_tokens,
        company,
        time.perf_counter() - started,
        identity,
        laws,
        options,
    )


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """At most `count` of them, evenly spaced."""
    count = min(count, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]
