"""Sampling: the emitted law is the target's, by exact enumeration of a tiny vocabulary, through the whole engine; and
mutants of the engine fail the same test."""

import itertools
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams

PROMPT = (1, 5, 2)
VOCAB = 8
DRAWS = 6000


@pytest.fixture(scope="module")
def engine(tiny_pair):
    from dflash2_ray import LLM

    engine = LLM(target=tiny_pair.target, drafter=tiny_pair.drafter, dtype="float32", max_num_seqs=32, draft_width="fixed")
    yield engine
    engine.close()


def exact_law(hf_target, options, length):
    """Probability of every continuation of PROMPT of the given length, by transformers' logits and warpers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(options["temperature"])])
    if options.get("top_k"):
        warpers.append(TopKLogitsWarper(options["top_k"]))
    if options.get("top_p"):
        warpers.append(TopPLogitsWarper(options["top_p"]))
    if options.get("min_p"):
        warpers.append(MinPLogitsWarper(options["min_p"]))
    sequences = torch.tensor([[*PROMPT, *rest] for rest in itertools.product(range(VOCAB), repeat=length)])
    with torch.inference_mode():
        logits = hf_target(sequences).logits.double()
    law = torch.ones(len(sequences), dtype=torch.float64)
    for step in range(length):
        at = len(PROMPT) + step
        probs = warpers(sequences[:, :at], logits[:, at - 1]).softmax(-1)
        law *= probs.gather(1, sequences[:, at, None])[:, 0]
    return law


def draw(loop, options, length, num_draws, max_tokens=5):
    """First `length` tokens of `num_draws` requests with seeds 0, 1, …; returns (index of the sequence, accepted)."""
    indices = []
    accepted = 0
    tokens: dict[str, list[int]] = {}
    waiting = iter(range(num_draws))
    open_requests = 0
    while True:
        while open_requests < 64 and (seed := next(waiting, None)) is not None:
            params = SamplingParams(seed=seed, max_tokens=max_tokens, **options)
            loop.add(RequestSpec(f"s{seed}", PROMPT, params))
            open_requests += 1
        if not open_requests:
            return indices, accepted
        for delta in loop.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason:
                open_requests -= 1
                accepted += delta.stats["num_accepted_draft_tokens"]
                index = 0
                for token in tokens.pop(delta.request_id)[:length]:
                    index = index * VOCAB + token
                indices.append(index)


def chi_square(indices, law):
    """(statistic, 0.1 % cut); cells with an expected count under 5 are pooled; impossible cells must be empty."""
    counts = torch.bincount(torch.tensor(indices), minlength=len(law)).double()
    assert counts[law == 0].sum() == 0, "a token of probability zero was emitted"
    expected = law * len(indices)
    small = expected < 5
    observed_cells = [*counts[~small].tolist(), counts[small].sum().item()]
    expected_cells = [*expected[~small].tolist(), expected[small].sum().item()]
    if expected_cells[-1] < 5:
        observed_cells, expected_cells = observed_cells[:-1], expected_cells[:-1]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed_cells, expected_cells, strict=True))
    return statistic, chi2.ppf(0.999, len(expected_cells) - 1)


OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.15},
    {"temperature": 1.2, "top_k": 5, "top_p": 0.85, "min_p": 0.05},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_joint_law_of_three_tokens(engine, tiny_pair, options):
    indices, accepted = draw(engine._loop, options, 3, DRAWS)
    statistic, cut = chi_square(indices, exact_law(tiny_pair.hf_target, options, 3))
    assert accepted > DRAWS / 4
    assert statistic < cut


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_plain_decoding_has_the_same_law(engine, tiny_pair, options):
    indices, accepted = draw(engine._loop, {**options, "num_speculative_tokens": 0}, 3, DRAWS)
    statistic, cut = chi_square(indices, exact_law(tiny_pair.hf_target, options, 3))
    assert accepted == 0
    assert statistic < cut


def test_a_changing_draft_width_keeps_the_law(tiny_pair):
    from dflash2_ray import LLM

    adaptive = LLM(target=tiny_pair.target, drafter=tiny_pair.drafter, dtype="float32", max_num_seqs=32, draft_width="auto")
    loop, widths = adaptive._loop, itertools.cycle([3, 0, 1, 3, 2])
    decide = loop.control.decide
    loop.control.decide = lambda load: loop.control.force(next(widths)) or decide(load)
    indices, accepted = draw(loop, OPTIONS[0], 3, DRAWS)
    adaptive.close()
    statistic, cut = chi_square(indices, exact_law(tiny_pair.hf_target, OPTIONS[0], 3))
    assert accepted > DRAWS / 8
    assert statistic < cut


def _shared_noise(monkeypatch, loop):
    from dflash2_ray.runtime import drafter_runner
    from dflash2_ray.sampling.noise import Purpose, uniforms

    monkeypatch.setattr(drafter_runner, "uniforms", lambda s, p, purpose: uniforms(s, p, Purpose.RESIDUAL))


def _proposals(monkeypatch, loop, change):
    propose = loop.draft_port.propose
    monkeypatch.setattr(loop.draft_port, "propose", lambda wanted: [change(p) for p in propose(wanted)])


def _other_temperature(monkeypatch, loop):
    def change(proposal):
        sharp = proposal.candidate_probs**2
        return replace(proposal, candidate_probs=sharp / sharp.sum(-1, keepdim=True))

    _proposals(monkeypatch, loop, change)


def _trim_looks_at_the_drawn_token(monkeypatch, loop):
    def change(proposal):
        drawn = torch.tensor(proposal.token_ids)[:, None]
        q = (proposal.candidate_probs * (proposal.candidate_ids == drawn)).sum(-1)
        keep = max(1, int((q > 0.3).int().cumprod(0).sum()))
        return replace(
            proposal,
            token_ids=proposal.token_ids[:keep],
            candidate_ids=proposal.candidate_ids[:keep],
            candidate_probs=proposal.candidate_probs[:keep],
        )

    _proposals(monkeypatch, loop, change)


def _argmax_as_sampled(monkeypatch, loop):
    from dflash2_ray.runtime import drafter_runner

    uniforms = drafter_runner.uniforms
    monkeypatch.setattr(drafter_runner, "uniforms", lambda s, p, purpose: uniforms(s, p, purpose) * 0 + 0.5)


@pytest.mark.parametrize(
    "mutate", [_shared_noise, _other_temperature, _trim_looks_at_the_drawn_token, _argmax_as_sampled]
)
def test_mutants_fail_the_same_test(engine, tiny_pair, monkeypatch, mutate):
    options = OPTIONS[0]
    mutate(monkeypatch, engine._loop)
    indices, accepted = draw(engine._loop, options, 3, 4 * DRAWS)
    statistic, cut = chi_square(indices, exact_law(tiny_pair.hf_target, options, 3))
    assert accepted > 0
    assert statistic > cut


# ---- seeded output depends on nothing but the request ---------------------------------------------------------------


def _tokens(loop, specs):
    tokens = {}
    for spec in specs:
        loop.add(spec)
    while loop.has_work:
        for delta in loop.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return tokens


@pytest.mark.parametrize("width", [None, 0])
def test_seeded_output_ignores_neighbours_and_preemption(embedded, prompts, width):
    def spec(index, **changes):
        params = SamplingParams(temperature=0.9, seed=1000 + index, max_tokens=40, num_speculative_tokens=width, ignore_eos=True)
        return RequestSpec(f"r{index}", tuple(prompts[index * 5]), replace(params, **changes))

    specs = [spec(index) for index in range(12)]
    alone = {}
    for one in specs:
        alone |= _tokens(embedded(max_num_seqs=1)._loop, [one])
    assert _tokens(embedded(max_num_seqs=1)._loop, specs[:3]) == {k: alone[k] for k in ("r0", "r1", "r2")}
    company = [RequestSpec(f"n{i}", tuple(prompts[i]), SamplingParams(temperature=1.0, seed=i, max_tokens=30)) for i in range(6)]
    greedy = RequestSpec("g", tuple(prompts[3]), SamplingParams(temperature=0.0, max_tokens=30))
    together = _tokens(embedded(max_num_seqs=16)._loop, [*specs, *company, greedy])
    assert {k: together[k] for k in alone} == alone
    assert together["g"] == _tokens(embedded(max_num_seqs=1)._loop, [greedy])["g"]  # B10
    tight = embedded(max_num_seqs=16, max_model_len=480, num_kv_pages=32)
    before = tight.describe()["num_preemptions"]
    assert _tokens(tight._loop, specs) == alone
    assert tight.describe()["num_preemptions"] > before
