"""The table of options, the schema, the README and the code agree."""

from dataclasses import fields
from pathlib import Path

import pytest

from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.errors import InvalidRequest
from dflash2_ray.serving.openai_api import read_request
from dflash2_ray.serving.options import OPTIONS, request_schema, table

ROOT = Path(__file__).parents[2]


def test_sampling_options_and_the_table_name_the_same_fields():
    inside = {"bad_words_token_ids", "grammar", "prompt_logprobs", "logprobs", "num_speculative_tokens"}
    assert {one.name for one in OPTIONS if one.sampling} == {field.name for field in fields(SamplingParams)} - inside


def test_every_exact_option_has_a_proof_that_names_it():
    for one in OPTIONS:
        if one.kind == "exact":
            assert one.name in (ROOT / one.proof).read_text(), f"{one.proof} does not test {one.name}"


def test_the_readme_shows_the_table():
    assert table() in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("option", [one for one in OPTIONS if one.kind == "refused"], ids=lambda one: one.name)
def test_refused_options_are_named_and_neutral_values_pass(option):
    chat = "completions" not in option.routes
    body = {"messages": [{}]} if chat else {"prompt": "a"}
    with pytest.raises(InvalidRequest) as caught:
        read_request({**body, option.name: {"some": "value"}}, None, chat=chat, served_model="m")
    assert caught.value.param == option.name
    for value in (None, *option.neutral):
        read_request({**body, option.name: value}, None, chat=chat, served_model="m")
    assert option.name not in request_schema(chat)["properties"]


def test_strict_fields_refuse_what_nobody_knows():
    assert read_request({"prompt": "a", "zebra": 1}, None, chat=False, served_model="m").ignored == ("zebra",)
    with pytest.raises(InvalidRequest) as caught:
        read_request({"prompt": "a", "zebra": 1}, None, chat=False, served_model="m", strict=True)
    assert caught.value.param == "zebra"
