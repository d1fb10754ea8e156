"""`dflash2-ray verify`: every kind of difference is found, on doctored answers and in an engine that speculates wrongly."""

import importlib
import json
from dataclasses import replace

import pytest
import typer

from dflash2_ray.errors import ConfigError
from dflash2_ray.serving.options import OPTIONS
from dflash2_ray.verification import service
from dflash2_ray.verification.answer import Answer, Choice, Prompt, refusal
from dflash2_ray.verification.backend import Facts
from dflash2_ray.verification.comparison import compare
from dflash2_ray.verification.identity import check_identity
from dflash2_ray.verification.in_process import InProcess
from dflash2_ray.verification.law import LAWS
from dflash2_ray.verification.option_check import OptionCheck
from dflash2_ray.verification.option_sets import NOT_PROVEN, Seen, option_sets
from dflash2_ray.verification.run import spread

command = importlib.import_module("dflash2_ray.cli.verify")  # the package has the function under this name
TOLD = ((-0.1, ((5, -0.1), (6, -3.0))), (-0.5, ((7, -0.5), (8, -0.9))))
GOOD = Answer((Choice("ab", (5, 7), "stop", "b", (("get_time", "{}"),), TOLD),), {"completion_tokens": 2}, 1)


def doctored(**changes):
    return replace(GOOD, choices=(replace(GOOD.choices[0], **changes),))


def test_equal_answers_are_equal():
    assert compare(GOOD, GOOD, 0.0) is None
    assert compare(GOOD, replace(GOOD, accepted=9), 0.0) is None
    swapped = ((-0.1, ((6, -0.1), (5, -3.0))), (-0.5001, ((7, -0.5), (8, -0.9))))
    assert compare(GOOD, doctored(logprobs=swapped), 1e-3) is None


@pytest.mark.parametrize(
    ("wrong", "what", "position"),
    [
        (doctored(token_ids=(5, 8)), "token", 1),
        (doctored(token_ids=(5,)), "token", 1),
        (doctored(token_ids=(5, 7, 7)), "token", 2),
        (doctored(text="aB"), "text", None),
        (doctored(finish_reason="length"), "finish_reason", None),
        (doctored(stop_reason=None), "stop_reason", None),
        (doctored(tool_calls=(("get_time", '{"zone": "UTC"}'),)), "tool_calls", None),
        (doctored(tool_calls=()), "tool_calls", None),
        (doctored(logprobs=None), "number of logprobs", None),
        (doctored(logprobs=TOLD[:1]), "number of logprobs", None),
        (doctored(logprobs=(TOLD[0], (-0.6, TOLD[1][1]))), "logprobs", 1),
        (doctored(logprobs=(TOLD[0], (-0.5, ((7, -0.5), (8, -1.2))))), "logprobs", 1),
        (doctored(logprobs=(TOLD[0], (-0.5, ((7, -0.5),)))), "logprobs", 1),
        (replace(GOOD, choices=GOOD.choices * 2), "number of choices", None),
        (replace(GOOD, usage={"completion_tokens": 3}), "usage", None),
        (refusal(400, "stop", "no"), "refusal", None),
    ],
)
def test_every_kind_of_difference_is_found(wrong, what, position):
    found = compare(GOOD, wrong, 1e-3)
    assert (found.what, found.position) == (what, position)
    assert what in str(found)


# ---- the checks on a scripted backend ----------------------------------------------------------------------------------

FACTS = Facts("in process", "m", "float32", "cpu", "d", 7, "fixed", 100, 4, (2,))


class Scripted:
    """Answers tokens 10, 11, …; `spoil(answer, speculate, prompt, stream)` changes what it says."""

    def __init__(self, spoil=lambda answer, **how: answer, facts=FACTS):
        self.spoil, self.facts = spoil, facts

    def answer(self, prompts, options, *, speculate, in_flight, top_logprobs=None, stream=False):
        ids = tuple(range(10, 10 + (options.get("max_tokens") or 4)))
        margins = (
            tuple((-0.1, ((token, -0.1), (99, -0.1 - 10.0 ** -(token - 9)))) for token in ids) if top_logprobs else None
        )
        choice = Choice(" ".join(map(str, ids)), ids, "length", logprobs=margins)
        good = Answer((choice,), {"completion_tokens": len(ids)}, 3 if speculate else 0)
        return [
            self.spoil(good, speculate=speculate, prompt=index, stream=stream, alone=in_flight == 1)
            for index in range(len(prompts))
        ]


def with_token(answer, position, token=99):
    ids = list(answer.choices[0].token_ids)
    ids[position] = token
    return replace(answer, choices=(replace(answer.choices[0], token_ids=tuple(ids)),))


PROMPTS = [Prompt(False, "a"), Prompt(True, "b"), Prompt(False, "c")]


def identity(spoil):
    return check_identity(Scripted(spoil), PROMPTS, max_tokens=6, company=4, bound=1e-3)


def test_identity_judges_first_differences_by_their_margin():
    assert identity(lambda answer, **how: answer).passed
    tie = identity(lambda answer, speculate, **how: with_token(answer, 3) if speculate else answer)
    assert tie.passed
    assert tie.runs[1].num_equal == 0
    assert tie.runs[1].differences[0].margin == pytest.approx(1e-4)
    assert not identity(
        lambda answer, speculate, prompt, **how: with_token(answer, 1) if speculate and prompt == 2 else answer
    ).passed
    assert not identity(
        lambda answer, speculate, alone, **how: with_token(answer, 1) if not speculate and not alone else answer
    ).passed


def test_identity_proves_nothing_without_drafts_or_answers():
    assert not identity(lambda answer, **how: replace(answer, accepted=0)).passed
    assert not identity(lambda answer, speculate, **how: refusal(400, "prompt", "no") if speculate else answer).passed


def options(spoil, dtype="float32"):
    check = OptionCheck(
        Scripted(spoil, replace(FACTS, dtype=dtype)),
        PROMPTS,
        max_tokens=6,
        in_flight=4,
        exact=dtype == "float32",
        tolerance=1e-3,
    )
    sets = [one for one in check.sets() if one.form is None]
    return check.run(sets)


def test_options_fail_on_one_wrong_answer():
    assert options(lambda answer, **how: answer).passed
    report = options(
        lambda answer, speculate, prompt, stream, **how: (
            with_token(answer, 1) if speculate and prompt == 1 and not stream else answer
        )
    )
    assert not report.passed
    assert report.sets[0].differences[0].as_dict() == {
        "text": "greedy",
        "prompt": 1,
        "run": "speculative",
        "what": "token",
        "one": 11,
        "other": 99,
        "position": 1,
        "choice": 0,
    }
    assert not options(lambda answer, stream, **how: with_token(answer, 1) if stream else answer).passed
    assert not options(lambda answer, **how: replace(answer, accepted=0)).passed
    assert not options(lambda answer, speculate, **how: refusal(400, "n", "no") if speculate else answer).passed


def test_options_that_are_refused_say_so():
    report = options(lambda answer, **how: refusal(400, "stop", "not offered"))
    assert not report.passed, "nothing was proven"
    assert all(one.refused == "400, stop: not offered" and one.passed for one in report.sets)


def test_in_reduced_precision_rare_differences_are_rounding_and_many_are_not():
    calls = iter(range(10**6))
    rare = lambda answer, speculate, **how: with_token(answer, 2) if speculate and next(calls) % 150 == 0 else answer  # noqa: E731
    report = options(rare, "bfloat16")
    assert report.passed
    assert any(one.rounding for one in report.sets)
    assert report.plain_texts > 100
    assert not options(
        lambda answer, speculate, **how: with_token(answer, 2) if speculate else answer, "bfloat16"
    ).passed
    assert not options(
        lambda answer, speculate, **how: replace(answer, usage={}) if speculate else answer, "bfloat16"
    ).passed


def test_a_form_that_is_not_kept_fails():
    check = OptionCheck(Scripted(), PROMPTS, max_tokens=6, in_flight=4, exact=True, tolerance=1e-3)
    stopped = lambda answer, **how: replace(answer, choices=(replace(answer.choices[0], finish_reason="stop"),))  # noqa: E731
    check._backend.spoil = stopped
    forms = [replace(one, beside=None) for one in check.sets() if one.form is not None]
    report = check.run(forms)
    assert len(forms) == 5
    assert all(one.differences[0].difference.what == "form" for one in report.sets)


def test_every_exact_option_is_in_a_set():
    sets = option_sets(Seen((5, 6, 7), ("a",), (5,), ("b",)), 8)
    covered = {name for one in sets for text in one.texts.values() for name in text}
    exact = {option.name for option in OPTIONS if option.kind == "exact"}
    assert exact - covered == set(NOT_PROVEN)
    assert covered - exact == set()
    names = [one.name for one in sets]
    assert all(one.beside is None or one.beside in names[: names.index(one.name)] for one in sets)
    assert len(set(names)) == len(names)


def test_values_come_from_what_the_model_says():
    answers = [
        Answer((Choice("the cat sat on the mat", (5, 5, 6, 7, 8, 2), "stop"),)),
        Answer((Choice("the", (5,), "stop"),)),
    ]
    seen = Seen.of(answers, eos_token_ids=(2,))
    assert seen.token_ids[0] == 5
    assert 2 not in seen.token_ids
    assert seen.words[0] == "the"
    assert set(seen.late_words) == {"the"}
    assert Seen.of([], ()).token_ids == (0,)


def test_prompts_are_spread():
    assert [one.text for one in spread([Prompt(False, str(index)) for index in range(10)], 3)] == ["0", "3", "6"]
    assert len(spread(PROMPTS, 9)) == 3


# ---- the wire ------------------------------------------------------------------------------------------------------------


def test_a_stream_joins_to_its_body():
    first = {"index": 0, "finish_reason": None, "logprobs": None}
    call = {"index": 0, "function": {"name": "f", "arguments": ""}}
    events = [
        {"choices": [{**first, "delta": {"role": "assistant", "content": "a"}, "token_ids": [1]}]},
        {"choices": [{**first, "delta": {"tool_calls": [call]}, "token_ids": [2]}]},
        {
            "choices": [
                {
                    **first,
                    "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
                    "token_ids": [],
                    "logprobs": {"content": [{"token": "token_id:1", "logprob": -1.0, "top_logprobs": []}]},
                }
            ]
        },
        {"choices": [{**first, "delta": {}, "finish_reason": "tool_calls", "stop_reason": 7}]},
        {"choices": [], "usage": {"total_tokens": 3}},
    ]
    answer = service.read_answer(service.joined(events))
    assert answer.usage == {"total_tokens": 3}
    assert answer.choices == (Choice("a", (1, 2), "tool_calls", 7, (("f", "{}"),), ((-1.0, ()),)),)
    with pytest.raises(ConfigError, match="DONE"):
        service._events("data: {}\n\n")
    with pytest.raises(ConfigError, match="lost"):
        service._events('data: {"error": {"message": "lost"}}\n\ndata: [DONE]\n\n')


def test_facts_say_what_cannot_be_verified():
    with pytest.raises(ConfigError, match="not a dflash2_ray service"):
        Facts.of("http://x", {"model": "m"})


# ---- the command, on the embedded pair -----------------------------------------------------------------------------------

WORDS = {"num_prompts": 4, "max_tokens": 20, "concurrency": 16, "samples": 60, "law_prompts": 1, "option_prompts": 1}
DEFAULTS = {
    "settings": ["dtype=float32"],
    "prompts": None,
    "checks": "identity,law,options",
    "margin": None,
    "url": "",
    "api_key": "",
    "model": "",
    "json_path": "-",
}


def run(capsys, **words):
    """(exit code, what it wrote) of the command in this process."""
    code = 0
    try:
        command.verify(**{**DEFAULTS, **WORDS, **words})
    except typer.Exit as done:
        code = done.exit_code
    return code, capsys.readouterr()


@pytest.fixture(scope="module")
def engine():
    from dflash2_ray import LLM

    engine = LLM(dtype="float32", draft_width="fixed", max_num_seqs=16)
    yield engine
    engine.close()


@pytest.fixture
def in_process(engine, monkeypatch):
    """The command's engine; `spoil` may change what it says when it speculates."""

    class Kept(InProcess):
        spoil = staticmethod(lambda answer: answer)

        def answer(self, prompts, options, *, speculate, **how):
            answers = super().answer(prompts, options, speculate=speculate, **how)
            return [self.spoil(one) if speculate else one for one in answers]

        def close(self):
            pass

    backend = Kept(engine)
    monkeypatch.setattr(command, "_engine", lambda settings, concurrency: backend)
    return backend


def test_everything_passes_and_the_report_is_json(in_process, capsys):
    code, wrote = run(capsys)
    report = json.loads(wrote.out)
    assert (code, report["passed"], report["reasons"]) == (0, True, []), wrote.err
    assert "passed" in wrote.err
    assert [one["num_equal"] for one in report["identity"]["runs"]] == [4, 4, 4]
    assert all(law["num_accepted_draft_tokens"] > 0 for law in report["laws"])
    sets = report["options"]["sets"]
    assert all(one["refused"] is None and one["num_texts"] > 0 for one in sets)
    assert sum(one["num_accepted_draft_tokens"] > 0 for one in sets) > len(sets) * 2 // 3
    assert sum(bool(one["had_effect"]) for one in sets) > len(sets) * 2 // 3


def test_a_backend_that_speculates_wrongly_fails(in_process, capsys):
    in_process.spoil = lambda answer: (
        with_token(answer, min(1, len(answer.choices[0].token_ids) - 1), 3) if answer.choices else answer
    )
    for check, says in (("identity", "greedy text differs"), ("law", "is not that of plain")):
        code, wrote = run(capsys, checks=check, json_path="")
        assert code == 1
        assert "FAIL" in wrote.out
        assert says in wrote.out
    check = OptionCheck(
        in_process, [Prompt(False, "Once upon a time")], max_tokens=8, in_flight=2, exact=True, tolerance=1e-3
    )
    assert not check.run(check.sets()[:1]).passed


def test_a_drafter_that_draws_another_law_than_it_says_fails(in_process, capsys, monkeypatch):
    from dflash2_ray.runtime import drafter_runner

    uniforms = drafter_runner.uniforms
    monkeypatch.setattr(
        drafter_runner, "uniforms", lambda seeds, positions, purpose: uniforms(seeds, positions, purpose) * 0 + 0.5
    )
    monkeypatch.delitem(LAWS, "temperature 1")  # one is enough
    code, wrote = run(capsys, checks="law", samples=200, num_prompts=24, law_prompts=3, concurrency=16)
    report = json.loads(wrote.out)
    assert code == 1
    assert report["laws"][0]["corrected_p"] < 1e-4, "1e-12 and less as a rule"


def test_no_drafts_prove_nothing(in_process, capsys, engine):
    engine.hold_draft_width(0)
    try:
        code, wrote = run(capsys, checks="identity", json_path="")
    finally:
        engine.hold_draft_width(None)
    assert code == 1
    assert "nothing was proven" in wrote.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"checks": "identity,laws"}, "--checks: expected identity, law, options"),
        ({"url": "http://127.0.0.1:9"}, "'dtype=float32' cannot be given"),
        ({"url": "127.0.0.1:8000", "settings": []}, "expected http://HOST:PORT"),
        ({"url": "http://127.0.0.1:9", "settings": []}, "cannot be reached"),
        ({"api_key": "x"}, "give --url too"),
    ],
)
def test_what_cannot_run_is_one_clear_line(capsys, words, says):
    with pytest.raises(ConfigError, match=says):
        run(capsys, **words)
