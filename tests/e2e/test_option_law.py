"""Options: at every slot of a verify block the emitted token has the target's law with the request's options applied to the
true history, accepted drafts included, under the standard rule (unseeded requests) and the matching rule (seeded ones).

Every emitted token is mapped into [0, 1) by its exact law: U = mass of the tokens ordered before it + V times its own mass, V
uniform. Under the exact law U is uniform, whatever the context, the slot and the order are; so the U of a slot are counted in
bins. The exact law is restated here in plain Python on transformers' fp64 logits. Engines with a bug fail the same check.
"""

import copy
import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

import pytest
import regex
import torch
from scipy.stats import chi2

from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.runtime import shapers
from dflash2_ray.sampling import rejection
from dflash2_ray.sampling.shaping import LogitShaper
from dflash2_ray.text.response_format import response_grammar

EOS = 2
LETTERS = dict(zip(range(4, 12), "!\"#$%&'(", strict=True))
PROMPTS = [(5, 9, 4), (7,), (4, 4, 10, 6), (0, 11, 8, 8), (1, 6, 9, 5, 7)]
MAX_TOKENS = 13  # the prefill's token and three full blocks
WIDTH = 3  # draft slots 0, 1 and 2 of a block; slot 3 holds the bonus
BINS = 10
REGEX = r"""([!"#$%]{1,3}[&'(]{1,2}){2,9}"""
FORM = regex.compile(REGEX)

OPTIONS = {
    "none": {},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "negative frequency_penalty": {"frequency_penalty": -0.5},
    "repetition_penalty": {"repetition_penalty": 6.0},
    "repetition_penalty below 1": {"repetition_penalty": 0.5},
    "logit_bias": {"logit_bias": {4: 1.5, 9: -2.0, 11: -100}},
    "allowed_token_ids": {"allowed_token_ids": [0, 1, 4, 5, 7, 8, 9, 10, 11]},
    "bad_words": {"bad_words_token_ids": [[5], [4, 6], [7, 8], [8, 7, 4], [9, 9, 9]]},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [4, 9], "ignore_eos": False},
    "min_p": {"min_p": 0.3},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "grammar": {"grammar": response_grammar({"type": "regex", "regex": REGEX}), "ignore_eos": False},
    "penalties": {"presence_penalty": -0.6, "frequency_penalty": 0.9, "repetition_penalty": 0.7, "temperature": 1.3},
    "long bad_words": {
        "allowed_token_ids": [4, 5, 6, 7, 8, 9, 10, 11],
        "bad_words_token_ids": [[4, 5, 6], [7, 8], [5, 4, 4, 7], [6, 6, 6, 6], [9, 9]],
        "logit_bias": {7: 0.5},
    },
    "grammar and more": {
        "grammar": response_grammar({"type": "regex", "regex": REGEX}), "ignore_eos": False, "frequency_penalty": 0.7,
        "logit_bias": {EOS: -1.0, 5: 0.5}, "bad_words_token_ids": [[4, 8], [9, 9]], "top_p": 0.97,
    },
    "all but grammar": {
        "presence_penalty": 0.3, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {4: 0.5, 9: -0.5},
        "allowed_token_ids": [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11], "bad_words_token_ids": [[4, 5], [10, 11]], "min_tokens": 8,
        "stop_token_ids": [8], "ignore_eos": False, "top_k": 9, "top_p": 0.97, "min_p": 0.1, "temperature": 1.2,
    },
}  # fmt: skip
RULES = {"u": "standard", "s": "matching"}


# ---- what the engine emits ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emitted:
    """One token, and where it was decided. slot: its place in its verify block, None for the token of a prefill."""

    spec: RequestSpec
    output: tuple[int, ...]
    token: int
    slot: int | None

    @property
    def fresh(self) -> list[int]:
        """Tokens that only accepted drafts of this very block have brought into the text, the last one first."""
        text = self.spec.prompt_token_ids + self.output
        block = len(text) - (self.slot or 0)
        return [token for token in reversed(text[block:]) if token not in text[:block]]


@pytest.fixture(scope="module")
def loop(text_pair):
    from dflash2_ray import LLM

    settings = {"dtype": "float32", "max_num_seqs": 128, "max_queued_requests": 10_000, "draft_width": "fixed"}
    engine = LLM(target=text_pair.target, drafter=text_pair.drafter, **settings)
    engine._loop._salt = "law"  # so that the noise of unseeded requests is that of their ids, every time
    yield engine._loop
    engine.close()


@pytest.fixture(scope="module")
def exact_target(text_pair):
    return copy.deepcopy(text_pair.hf_target).double()


def requests(name, each):
    """`each` unseeded and as many seeded requests with the options of that name, in turns."""
    options = {"max_tokens": MAX_TOKENS, "ignore_eos": True, **OPTIONS[name]}
    first_seed = 10_000 * list(OPTIONS).index(name)  # no noise is shared, so that all U are independent
    for index in range(each):
        for rule in RULES:
            params = SamplingParams(seed=first_seed + index if rule == "s" else None, **options)
            yield RequestSpec(f"{rule}:{name}:{index}", PROMPTS[index % len(PROMPTS)], params)


def run(loop, specs, *, may_fail=False):
    """Every token that the engine emits for these requests. may_fail: some may end with an error."""
    by_id = {spec.request_id: spec for spec in specs}
    for spec in specs:
        loop.add(spec)
    outputs = {spec.request_id: spec.output_token_ids for spec in specs}
    emitted = []
    while loop.has_work:
        for delta in loop.step():
            assert may_fail or delta.error is None, delta.error
            for place, token in enumerate(delta.token_ids):
                output = outputs[delta.request_id]
                emitted.append(Emitted(by_id[delta.request_id], output, token, place if delta.steps else None))
                outputs[delta.request_id] = (*output, token)
    return emitted


# ---- the law that they must have, restated --------------------------------------------------------------------------


def exact_logits(target, emitted):
    """Logits behind every context, fp64, in the order of `emitted`: one batch of whole sequences."""
    contexts = [(*one.spec.prompt_token_ids, *one.output) for one in emitted]
    inner = {context[:-1] for context in contexts}
    whole = [context for context in dict.fromkeys(contexts) if context not in inner]
    longest = max(map(len, whole))
    with torch.inference_mode():
        found = target(torch.tensor([[*context, *[0] * (longest - len(context))] for context in whole])).logits
    rows = {context[: end + 1]: found[row, end] for row, context in enumerate(whole) for end in range(len(context))}
    return [rows[context].tolist() for context in contexts]


def excluded(spec, output, vocab_size):
    """Tokens that cannot be emitted behind this output."""
    params = spec.params
    gone = set()
    if params.allowed_token_ids is not None:
        gone |= set(range(vocab_size)) - set(params.allowed_token_ids)
    for word in params.bad_words_token_ids:
        *before, last = word
        if list(output[len(output) - len(before) :]) == before:
            gone.add(last)
    if len(output) < params.min_tokens:
        gone |= {EOS, *params.stop_token_ids}
    if params.grammar is not None:
        gone |= set(range(vocab_size)) - continuing("".join(LETTERS[token] for token in output))
    return gone


@cache
def continuing(text):
    """Tokens that may follow a text of REGEX."""
    tokens = {token for token, letter in LETTERS.items() if FORM.fullmatch(text + letter, partial=True)}
    return tokens | ({EOS} if FORM.fullmatch(text) else set())


def shaped(logits, spec, output):
    """Logits with the options applied."""
    params, counts = spec.params, Counter(output)
    logits = list(logits)
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in set(output) | set(spec.prompt_token_ids):
        logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
    for token, count in counts.items():
        logits[token] -= params.presence_penalty + params.frequency_penalty * count
    for token in excluded(spec, output, len(logits)):
        logits[token] = -math.inf
    return logits


def softmax(logits, temperature):
    top = max(logits)
    weights = [math.exp((logit - top) / temperature) for logit in logits]
    mass = math.fsum(weights)
    return [weight / mass for weight in weights]


def filtered(probs, params):
    """Probabilities behind top_k, top_p and min_p."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = order[: params.top_k or None]
    mass = math.fsum(probs[token] for token in kept)
    reached, nucleus = 0.0, []
    for token in kept:
        if params.top_p < 1 and reached >= params.top_p:
            break
        nucleus.append(token)
        reached += probs[token] / mass
    kept = [token for token in nucleus if probs[token] >= params.min_p * probs[order[0]]]
    mass = math.fsum(probs[token] for token in kept)
    return [probs[token] / mass if token in kept else 0.0 for token in range(len(probs))]


# ---- the check ------------------------------------------------------------------------------------------------------


def named(params):
    """Tokens that the options speak of."""
    last = {word[-1] for word in params.bad_words_token_ids}
    return {EOS, *params.stop_token_ids, *last, *(token for token, _ in params.logit_bias)}


def orders(law, plain, one):
    """Orders of the tokens, by name; each shows other errors. plain: the law without options.

    recent first: the fresh ones lead, then the last ones of the text.
    """
    tokens = range(len(law))
    own = named(one.spec.params)
    favour = [(-round(law[token] / plain[token], 9), token not in own, token) for token in tokens]
    return {
        "id": list(tokens),
        "likely first": sorted(tokens, key=lambda token: -law[token]),
        "recent first": list(dict.fromkeys([*one.fresh, *reversed(one.spec.prompt_token_ids + one.output), *tokens])),
        "favoured first": sorted(tokens, key=favour.__getitem__),
    }


def places(target, emitted):
    """U of every token: {(group, order): [U]}, or None when one had no probability. Groups: the slot; whether
    the block has brought new tokens into the text; the place in the output, with drafts of the block before it or not."""
    dice = random.Random(20261201)
    found = defaultdict(list)
    for one, logits in zip(emitted, exact_logits(target, emitted), strict=True):
        params = one.spec.params
        law = filtered(softmax(shaped(logits, one.spec, one.output), params.temperature), params)
        if law[one.token] == 0:
            return None
        for name, order in orders(law, softmax(logits, params.temperature), one).items():
            before = math.fsum(law[token] for token in order[: order.index(one.token)])
            place = before + dice.random() * law[one.token]
            found["slot", one.slot, name].append(place)
            found["fresh", bool(one.fresh), name].append(place)
            found["position", len(one.output), bool(one.slot), name].append(place)
    return found


def chi_square_p(values):
    """p-value of the values being uniform on [0, 1)."""
    counts = Counter(min(int(value * BINS), BINS - 1) for value in values)
    expected = len(values) / BINS
    statistic = sum((counts[cell] - expected) ** 2 / expected for cell in range(BINS))
    return chi2.sf(statistic, BINS - 1)


def worst_p(target, emitted):
    """The smallest p-value over slots, positions and orders, times their number; 0 where an impossible token was emitted."""
    found = places(target, emitted)
    if found is None:
        return 0.0
    values = [chi_square_p(one) for one in found.values() if len(one) >= 10 * BINS]
    return min(1.0, len(values) * min(values))


def by_rule(emitted):
    return {rule: [one for one in emitted if one.spec.request_id.startswith(f"{key}:")] for key, rule in RULES.items()}


def check(target, emitted, least):
    """Both rules must have the law, with at least so many tokens at every slot."""
    for rule, own in by_rule(emitted).items():
        slots = Counter(one.slot for one in own)
        worst = worst_p(target, own)
        print(f"{rule}: p {worst:.2g}, tokens of slots {[slots[slot] for slot in range(WIDTH + 1)]}")
        assert min(slots[slot] for slot in range(WIDTH + 1)) >= least
        assert worst > CUT


CUT = 1e-4  # per rule and test; mutants must come out a hundred times lower
EACH = 400
MORE = {"grammar": 700, "grammar and more": 700}  # drafts know no grammar: fewer of them get far


@pytest.mark.parametrize("name", OPTIONS)
def test_every_slot_has_the_law_of_its_history(loop, exact_target, name):
    check(exact_target, run(loop, list(requests(name, MORE.get(name, EACH)))), 200)


def test_requests_with_different_options_in_one_batch(loop, exact_target):
    """Every third one goes on behind tokens that its client has got already: they are history like any other."""
    mixed = [spec for row in zip(*(requests(name, 45) for name in OPTIONS), strict=True) for spec in row]
    mixed = [replace(spec, output_token_ids=(6, 7)) if index % 3 == 0 else spec for index, spec in enumerate(mixed)]
    check(exact_target, run(loop, mixed), 300)


# ---- mutants --------------------------------------------------------------------------------------------------------


def _shape(monkeypatch, wrong):
    """wrong(shape, shaper, logits, output, drafts) in place of shape(shaper, logits, output, drafts)."""
    shape = LogitShaper.shape
    monkeypatch.setattr(LogitShaper, "shape", lambda shaper, *block: wrong(shape, shaper, *block))


def _drafts_are_no_history(monkeypatch):
    def wrong(shape, shaper, logits, output, drafts):
        for row in range(len(logits)):
            shape(shaper, logits[row : row + 1], output, [])

    _shape(monkeypatch, wrong)


def _only_the_first_slot(monkeypatch):
    _shape(monkeypatch, lambda shape, shaper, logits, output, drafts: shape(shaper, logits[:1], output, []))


def _not_the_bonus(monkeypatch):
    def wrong(shape, shaper, logits, output, drafts):
        shape(shaper, logits[: max(1, len(drafts))], output, drafts[:-1])

    _shape(monkeypatch, wrong)


def _a_draft_is_its_own_history(monkeypatch):
    penalise = LogitShaper._penalise

    def wrong(shaper, logits, output, drafts):
        shifted = torch.cat([logits[:1], logits[:-1]])
        penalise(shaper, shifted, output, drafts)
        penalise(shaper, logits, output, drafts)
        logits[:-1] = shifted[1:]

    monkeypatch.setattr(LogitShaper, "_penalise", wrong)


def _drafts_stay_counted(monkeypatch):
    penalise = LogitShaper._penalise

    def wrong(shaper, logits, output, drafts):
        penalise(shaper, logits, output, drafts)
        shaper._counts.update(drafts)

    monkeypatch.setattr(LogitShaper, "_penalise", wrong)


def _shapers_with(monkeypatch, change):
    monkeypatch.setattr(shapers, "LogitShaper", lambda **settings: LogitShaper(**{**settings, **change(settings)}))


def _min_tokens_one_short(monkeypatch):
    _shapers_with(monkeypatch, lambda settings: {"min_tokens": settings["min_tokens"] - 1})


def _min_tokens_one_long(monkeypatch):
    _shapers_with(monkeypatch, lambda settings: {"min_tokens": settings["min_tokens"] + 1})


def _prompt_is_no_history(monkeypatch):
    _shapers_with(monkeypatch, lambda settings: {"prompt": ()})


def _min_tokens_by_block(monkeypatch):
    def wrong(shape, shaper, logits, output, drafts):
        shape(shaper, logits, output, drafts)
        if len(output) < shaper._min_tokens:
            logits[:, shaper._ending] = -math.inf

    _shape(monkeypatch, wrong)


def _filters_at_the_first_slot_only(monkeypatch):
    probabilities = rejection._probabilities

    def wrong(logits, rows, starts, sampled):
        count = len(rows.num_drafts)
        probs = probabilities(
            logits, replace(rows, top_k=[0] * count, top_p=[1.0] * count, min_p=[0.0] * count), starts, sampled
        )
        firsts = [0, *accumulate(rows.num_drafts[r] + 1 for r in sampled)][:-1]
        probs[firsts] = probabilities(logits, rows, starts, sampled)[firsts]
        return probs

    monkeypatch.setattr(rejection, "_probabilities", wrong)


def _min_p_a_little_higher(monkeypatch):
    right = rejection.target_probs
    monkeypatch.setattr(
        rejection, "target_probs", lambda *given: right(*given[:-1], [1.2 * floor for floor in given[-1]])
    )


@pytest.mark.parametrize(
    ("mutate", "name", "each"),
    [
        (_drafts_are_no_history, "presence_penalty", 200),
        (_drafts_are_no_history, "frequency_penalty", 200),
        (_drafts_are_no_history, "repetition_penalty", 800),
        (_drafts_are_no_history, "bad_words", 100),
        (_drafts_are_no_history, "grammar", 100),
        (_drafts_are_no_history, "all but grammar", 100),
        (_only_the_first_slot, "presence_penalty", 100),
        (_only_the_first_slot, "logit_bias", 100),
        (_only_the_first_slot, "allowed_token_ids", 100),
        (_not_the_bonus, "frequency_penalty", 200),
        (_not_the_bonus, "logit_bias", 150),
        (_not_the_bonus, "grammar and more", 100),
        (_a_draft_is_its_own_history, "frequency_penalty", 200),
        (_drafts_stay_counted, "frequency_penalty", 250),
        (_prompt_is_no_history, "repetition_penalty", 400),
        (_min_tokens_one_short, "min_tokens", 100),
        (_min_tokens_one_long, "min_tokens", 400),
        (_min_tokens_by_block, "min_tokens", 400),
        (_filters_at_the_first_slot_only, "top_k", 100),
        (_filters_at_the_first_slot_only, "top_p", 100),
        (_min_p_a_little_higher, "min_p", 200),
    ],
)
def test_mutants_fail_the_same_check(loop, exact_target, monkeypatch, mutate, name, each):
    mutate(monkeypatch)
    emitted = run(loop, list(requests(name, each)), may_fail=True)
    worst = {rule: float(worst_p(exact_target, own)) for rule, own in by_rule(emitted).items()}
    print(f"{mutate.__name__} {name}: {worst}")
    assert max(worst.values()) < CUT / 100
