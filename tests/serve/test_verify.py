"""`dflash2-ray verify --url` against the service: what holds passes, and its answers are those of an engine in this process."""

import importlib
import json
from dataclasses import replace

import httpx
import pytest

from dflash2_ray.errors import ConfigError
from dflash2_ray.verification.answer import Prompt
from dflash2_ray.verification.comparison import compare
from dflash2_ray.verification.in_process import InProcess
from dflash2_ray.verification.service import Service

command = importlib.import_module("dflash2_ray.cli.verify")  # the package has the function under this name
PROMPTS = [Prompt(False, "Once upon a time"), Prompt(True, "Write a short story about a pony named Anna.")]


def test_a_running_service_is_verified(idle, capsys):
    command.verify(
        settings=None,
        prompts=None,
        num_prompts=3,
        max_tokens=16,
        concurrency=8,
        checks="identity,law,options",
        samples=40,
        law_prompts=2,
        option_prompts=1,
        margin=None,
        url=idle.url + "/v1/",
        api_key="",
        model="dflash2-embedded",
        json_path="-",
    )
    wrote = capsys.readouterr()
    report = json.loads(wrote.out)
    assert report["passed"]
    assert report["company"] == idle.settings["max_num_seqs"], "no more at once than the service runs"
    assert all(one["refused"] is None and one["num_texts"] > 0 for one in report["options"]["sets"])
    assert "passed" in wrote.err


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_both_backends_say_the_same(idle, engine, stream):
    there, here = Service(idle.url), InProcess(engine)
    assert there.num_tokens(PROMPTS) == here.num_tokens(PROMPTS)
    for options in (
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3, "n": 2, "stop": ["an", "e"]},
        {"temperature": 0, "echo": True},
    ):
        how = {"speculate": True, "in_flight": 2, "top_logprobs": 2}
        pairs = zip(
            there.answer(PROMPTS, {"max_tokens": 12, **options}, stream=stream, **how),
            here.answer(PROMPTS, {"max_tokens": 12, **options}, **how),
            strict=True,
        )
        for one, other in pairs:
            told = [choice for choice in one.choices if choice.logprobs]
            assert bool(told) == bool(one.choices)
            if not stream:
                assert one.accepted == other.accepted
            assert compare(_best(one), _best(other), 1e-3) is None, options
    there.close()


def _best(answer):
    """With the two best alternatives of each token: completions tell the token itself besides."""

    def best(told):
        return tuple((own, tuple(sorted(others, key=lambda one: -one[1])[:2])) for own, others in told)

    return replace(answer, choices=tuple(replace(choice, logprobs=best(choice.logprobs)) for choice in answer.choices))


def test_what_cannot_be_verified_is_told(idle):
    with pytest.raises(ConfigError, match="serves 'dflash2-embedded', expected 'other'"):
        Service(idle.url, model="other")
    there = Service(idle.url)
    (refused,) = there.answer([PROMPTS[0]], {"guided_json": {}}, speculate=True, in_flight=1)
    assert refused.refused == "400, guided_json"
    there.close()


def scripted(*responses):
    """A client whose service gives these responses in order, behind the facts of /server_info."""
    config = {
        "dtype": "float32",
        "device": "cpu",
        "drafter": "d",
        "num_speculative_tokens": 7,
        "draft_width": "fixed",
        "max_num_seqs": 2,
    }
    facts = httpx.Response(200, json={"model": "m", "config": config, "max_model_len": 64, "eos_token_ids": [2]})
    waiting = iter([facts, *responses])
    return httpx.Client(base_url="http://service", transport=httpx.MockTransport(lambda request: next(waiting)))


DONE = {"choices": [{"text": "a", "token_ids": [5], "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}


def test_a_full_service_is_asked_again():
    full = httpx.Response(429, json={"error": {"message": "full"}}, headers={"Retry-After": "0"})
    there = Service("http://service", http=scripted(full, full, httpx.Response(200, json=DONE)))
    (answer,) = there.answer(PROMPTS[:1], {}, speculate=True, in_flight=1)
    assert answer.choices[0].token_ids == (5,)


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (httpx.Response(401, json={"error": {"message": "no"}}), "--api-key"),
        (httpx.Response(500, json={"error": {"message": "The engine failed"}}), "answered 500: The engine failed"),
        (httpx.Response(200, text="<html>"), "is not JSON"),
    ],
)
def test_a_service_that_fails_is_one_line(response, says):
    there = Service("http://service", http=scripted(response))
    with pytest.raises(ConfigError, match=says):
        there.answer(PROMPTS[:1], {}, speculate=True, in_flight=1)


def test_a_service_without_drafter_is_refused():
    told = {
        "model": "m",
        "max_model_len": 64,
        "eos_token_ids": [2],
        "config": {
            "dtype": "float32",
            "device": "cpu",
            "drafter": None,
            "num_speculative_tokens": 0,
            "draft_width": "fixed",
            "max_num_seqs": 2,
        },
    }
    http = httpx.Client(
        base_url="http://service", transport=httpx.MockTransport(lambda request: httpx.Response(200, json=told))
    )
    with pytest.raises(ConfigError, match="no drafter is configured"):
        Service("http://service", http=http)
