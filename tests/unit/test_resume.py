"""A request over several attempts: what is sent again, and when it is given up. A clock that the test turns."""

from pathlib import Path

import pytest

import dflash2_ray
from dflash2_ray.core.messages import RequestDelta, RequestSpec
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.core.wire import pack_delta, pack_error, unpack_spec
from dflash2_ray.engine.resume import ResumableRequest
from dflash2_ray.errors import InvalidRequest, Overloaded, StepFailed, Stopping, UnitLost
from dflash2_ray.text.assembly import TextAssembler
from dflash2_ray.text.tokenizer import Tokenizer


@pytest.fixture
def made():
    tokenizer = Tokenizer.from_folder(Path(dflash2_ray.__file__).parent / "assets" / "target")
    now = [0.0]
    spec = RequestSpec("r", (5, 6, 7), SamplingParams(max_tokens=9, seed=3))
    request = ResumableRequest(spec, TextAssembler(tokenizer, "r", 3, started=0.0), 10.0, lambda: now[0])
    return request, now


def delta(*token_ids, finish=None):
    return pack_delta(RequestDelta("r", token_ids, finish, stats={} if finish else None))


def test_an_attempt_carries_what_the_client_has(made):
    request, _ = made
    assert unpack_spec(request.attempt()).output_token_ids == ()
    chunks = [request.absorb(delta(40, 41)), request.absorb(delta(42))]
    with pytest.raises(UnitLost):
        request.absorb({"refused": pack_error(UnitLost("gone"))})
    assert request.lost(UnitLost("gone")) == 0.0  # the first attempt follows at once
    again = unpack_spec(request.attempt())
    assert again.output_token_ids == (40, 41, 42)
    assert (again.prompt_token_ids, again.params.seed, again.request_id) == ((5, 6, 7), 3, "r")
    chunks.append(request.absorb(delta(43, finish="length")))
    assert request.finished
    generation = chunks[-1].generation
    assert generation.token_ids == [40, 41, 42, 43]
    assert generation.text == "".join(chunk.text for chunk in chunks)
    assert generation.metrics["num_resumes"] == 1


def test_the_deadline_runs_from_the_loss_and_starts_anew_with_a_token(made):
    request, now = made
    assert request.patience_s is None
    request.lost(UnitLost("one"))
    now[0] = 9.0
    assert request.patience_s == pytest.approx(1.0)
    assert request.lost(Stopping("two")) > 0
    request.absorb(delta(40))
    assert request.patience_s is None
    now[0] = 15.0
    request.lost(UnitLost("three"))
    assert request.lost(Overloaded("four")) > 0  # full while others come over from the lost unit: wait
    now[0] = 25.0
    with pytest.raises(UnitLost, match="five"):
        request.lost(UnitLost("five"))


@pytest.mark.parametrize("error", [InvalidRequest("bad"), StepFailed("bad"), Overloaded("full")])
def test_other_errors_are_final(made, error):
    request, _ = made
    with pytest.raises(type(error)):
        request.lost(error)


def test_a_step_that_failed_is_final(made):
    request, _ = made
    with pytest.raises(StepFailed, match="boom"):
        request.absorb(pack_delta(RequestDelta("r", (), "error", error=pack_error(StepFailed("boom")))))


def test_no_time_means_no_second_attempt():
    request = ResumableRequest(RequestSpec("r", (1,), SamplingParams()), None, 0.0)
    with pytest.raises(UnitLost, match="gone"):
        request.lost(UnitLost("gone"))
