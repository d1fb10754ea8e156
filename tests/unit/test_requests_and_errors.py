"""Sampling options and requests: every bad value is refused with its field named (B38, B39, B40); every error has its
HTTP form and survives pickle."""

import copy
import pickle

import pytest

from dflash2_ray import errors
from dflash2_ray.core.admission import check_spec
from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.errors import (
    HTTP_TABLE,
    CheckpointError,
    ConfigError,
    ContextLengthExceeded,
    DeadlinePassed,
    DFlash2Error,
    EngineError,
    InvalidRequest,
    Overloaded,
    RequestError,
    StepFailed,
    Stopping,
    UnitLost,
    UnknownModel,
    http_error,
)

NAN, INF = float("nan"), float("inf")
BAD = {
    "temperature": [-0.1, 100.1, NAN, INF, -INF, "1", True, [1.0], 10**400, -(10**400)],
    "top_p": [0, 0.0, -0.1, 1.0001, NAN, "1", True, 10**400],
    "top_k": [-2, 1.0, 2**31, True, "3", NAN, 10**400],
    "min_p": [-0.1, 1.1, NAN, True, "0", 10**400],
    "seed": [1.0, True, "1", 2**63, -(2**63) - 1, NAN, 10**400],
    "max_tokens": [0, -1, 1.0, True, "5", 2**64, NAN, 10**400],
    "num_speculative_tokens": [-1, 1.0, True, "2", 2**31],
    "ignore_eos": [0, 1, "true", [True]],
    "stop_token_ids": ["2", 2, {2}, [-1], [1.5], [True], [[2]], ["2"], [NAN]],
}


def short(value):
    """A test id that fits a line."""
    return repr(value)[:24]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values], ids=short
)
def test_a_bad_option_is_refused_by_name(name, value):
    for build in (SamplingParams, SamplingParams.from_keywords):
        with pytest.raises(InvalidRequest, match=name) as caught:
            build(**{name: value})
        assert caught.value.param == name


GOOD = {
    "temperature": [0, 0.0, 1, 1e-5, 100],
    "top_p": [1e-9, 0.5, 1],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "min_p": [0, 0.5, 1],
    "seed": [0, -(2**63), 2**63 - 1],
    "max_tokens": [1, 10**12],
    "num_speculative_tokens": [0, 1, 2**31 - 1],
    "ignore_eos": [True, False],
    "stop_token_ids": [[], (), [0, 7]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_a_good_option_is_kept_in_its_type(name, value):
    got = getattr(SamplingParams(**{name: value}), name)
    if name == "top_k":
        assert got == max(0, value)
    elif name == "stop_token_ids":
        assert got == tuple(value)
    else:
        assert got == value
        assert type(got) is (float if name in ("temperature", "top_p", "min_p") else type(value))


def test_none_means_left_out_and_unknown_options_are_named():
    assert SamplingParams.from_keywords(temperature=None, seed=None, top_p=0.5) == SamplingParams(top_p=0.5)
    with pytest.raises(InvalidRequest, match=r"unknown sampling option 'beam'.*top_p") as caught:
        SamplingParams.from_keywords(beam=3)
    assert caught.value.param == "beam"


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def check(prompt, output=(), vocab_size=259, max_model_len=64, **params):
    check_spec(
        RequestSpec("r", prompt, SamplingParams(**params), output), vocab_size=vocab_size, max_model_len=max_model_len
    )


@pytest.mark.parametrize("prompt", [(), []])
def test_b38_an_empty_prompt(prompt):
    with pytest.raises(InvalidRequest, match="no token") as caught:
        check(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("token", [-1, 259, 2**63, 2**64, 1.5, 1.0, True, False, None, "1", [1, 2], NAN])
def test_b39_a_token_outside_the_vocabulary(token):
    for place in range(3):
        prompt = [1, 2]
        prompt.insert(place, token)
        with pytest.raises(InvalidRequest) as caught:
            check(prompt)
        assert caught.value.param == "prompt"
        assert f"from 0 to 258, got {token!r}" in str(caught.value)
    with pytest.raises(InvalidRequest):
        check([1], output=(3, token))


def test_b39_stop_tokens_outside_the_vocabulary():
    for token in (259, 2**63):
        with pytest.raises(InvalidRequest, match=str(token)) as caught:
            check([1], stop_token_ids=[5, token])
        assert caught.value.param == "stop_token_ids"
    check([0, 258], stop_token_ids=[0, 258])


@pytest.mark.parametrize("length", [64, 65, 500])
def test_b40_a_prompt_that_leaves_no_room(length):
    with pytest.raises(ContextLengthExceeded, match=f"{length} tokens; the context of 64") as caught:
        check([1] * length)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(("length", "asked"), [(63, 2), (1, 64), (10, 10**12), (1, 2**63)])
def test_b40_prompt_and_completion_together(length, asked):
    with pytest.raises(ContextLengthExceeded) as caught:
        check([1] * length, max_tokens=asked)
    assert all(str(number) in str(caught.value) for number in (length, asked, length + asked, 64))


def test_b40_what_just_fits():
    check([1] * 63)
    check([1] * 63, max_tokens=1)
    check([1], max_tokens=63)


# ---- errors ---------------------------------------------------------------------------------------------------------

EVERY = [
    InvalidRequest("bad", param="seed"),
    InvalidRequest("bad"),
    RequestError("bad", param="p", code="c"),
    ContextLengthExceeded("long"),
    ContextLengthExceeded("long", param="messages"),
    UnknownModel("who"),
    Overloaded("full"),
    Overloaded("full", retry_after_s=7.5),
    ConfigError("key: bad"),
    CheckpointError("file: bad"),
    EngineError("secret"),
    StepFailed("secret"),
    UnitLost("secret"),
    Stopping("secret"),
    DeadlinePassed("secret"),
    DFlash2Error("secret"),
]
HTTP = {
    InvalidRequest: (400, "invalid_request_error", None),
    RequestError: (400, "invalid_request_error", None),
    ContextLengthExceeded: (400, "invalid_request_error", "context_length_exceeded"),
    UnknownModel: (404, "invalid_request_error", "model_not_found"),
    Overloaded: (429, "rate_limit_error", "queue_full"),
    ConfigError: (500, "server_error", None),
    CheckpointError: (500, "server_error", None),
    EngineError: (500, "server_error", None),
    StepFailed: (500, "server_error", None),
    UnitLost: (503, "server_error", "service_unavailable"),
    Stopping: (503, "server_error", "service_unavailable"),
    DeadlinePassed: (504, "server_error", "timeout"),
    DFlash2Error: (500, "server_error", None),
}


def test_no_error_class_is_forgotten():
    own = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, DFlash2Error)}
    assert own == set(HTTP) == {type(error) for error in EVERY}


@pytest.mark.parametrize("error", EVERY, ids=repr)
def test_http_form(error):
    row = http_error(error)
    assert (row.status, row.type, row.code) == HTTP[type(error)]
    assert (row.message is None) == (row.status < 500), "a fault of ours never shows its own text"
    if isinstance(error, RequestError) and row.code is not None:
        assert error.code == row.code


@pytest.mark.parametrize("error", [ValueError("secret"), KeyError("x"), KeyboardInterrupt(), MemoryError()])
def test_anything_else_is_a_plain_500(error):
    row = http_error(error)
    assert (row.status, row.type) == (500, "server_error")
    assert row.message
    assert "secret" not in row.message


def test_no_row_of_the_table_is_shadowed():
    for index, (kind, _) in enumerate(HTTP_TABLE):
        assert not any(issubclass(kind, earlier) for earlier, _ in HTTP_TABLE[:index])


@pytest.mark.parametrize("error", EVERY, ids=repr)
def test_errors_survive_pickle_and_copy(error):
    for again in (
        *(pickle.loads(pickle.dumps(error, p)) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)),
        copy.copy(error),
    ):
        assert type(again) is type(error)
        assert str(again) == str(error)
        for name in ("message", "param", "code", "retry_after_s"):
            assert getattr(again, name, "absent") == getattr(error, name, "absent")
        assert http_error(again) == http_error(error)
