"""litellm against the service, by both of its ways to speak to one: `hosted_vllm/` and `openai/`."""

import json
import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import litellm
from scenarios import CHAT, KEY, MODEL, TOOL, URL, WEATHER, finish, same

litellm.suppress_debug_info = True
NAMES = (f"hosted_vllm/{MODEL}", f"openai/{MODEL}")


def ask(name: str, **options):
    """One chat completion through litellm, without retries."""
    asked = {"messages": CHAT, "temperature": 0, "max_tokens": 40, "max_retries": 0, **options}
    return litellm.completion(model=name, api_base=f"{URL}/v1", api_key=KEY, **asked)


def text_and_usage():
    """The same text by both ways, with counts."""
    answers = [ask(name) for name in NAMES]
    same(answers[0].choices[0].message.content, answers[1].choices[0].message.content, "text")
    for answer in answers:
        assert answer.choices[0].message.content
        same(answer.usage.completion_tokens, 40, "completion tokens")
        same(answer.choices[0].finish_reason, "length", "finish reason")


def streams():
    """Pieces join to the whole; usage comes when asked for."""
    for name in NAMES:
        whole = ask(name)
        chunks = list(ask(name, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        same(text, whole.choices[0].message.content, name)
        built = litellm.stream_chunk_builder(chunks, messages=CHAT)
        same(built.usage.completion_tokens, whole.usage.completion_tokens, "usage of the stream")


def options():
    """Sampling options, stop strings, several choices, logprobs."""
    for name in NAMES:
        answer = ask(name, temperature=0.8, top_p=0.9, seed=3, n=2, logprobs=True, top_logprobs=2)
        same(len(answer.choices), 2, "choices")
        assert answer.choices[0].logprobs.content
        full = ask(name).choices[0].message.content
        stop = full[12:16]
        same(ask(name, stop=[stop]).choices[0].message.content, full[: full.index(stop)], "stop")
        ask(name, frequency_penalty=0.5, presence_penalty=0.5, logit_bias={"5": -1})


def tools():
    """A required call, whole and streamed."""
    for name in NAMES:
        asked = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
        (call, *_) = ask(name, **asked).choices[0].message.tool_calls
        same(call.function.name, "report_weather")
        same(set(json.loads(call.function.arguments)), {"sky", "warm"})
        built = litellm.stream_chunk_builder(list(ask(name, **asked, stream=True)), messages=CHAT)
        same(built.choices[0].message.tool_calls[0].function.arguments, call.function.arguments, "streamed arguments")


def structured_output():
    """A JSON schema is held."""
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    for name in NAMES:
        answer = ask(name, response_format=schema, max_tokens=200)
        same(set(json.loads(answer.choices[0].message.content)), {"sky", "warm"})


def text_completions():
    """The completions route."""
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="import os",
        api_base=f"{URL}/v1",
        api_key=KEY,
        temperature=0,
        max_tokens=8,
    )
    assert answer.choices[0].text


def errors():
    """Classes by status."""
    for name in NAMES:
        for changed, kind in (
            ({"temperature": -1}, litellm.BadRequestError),
            ({"max_tokens": 10**6}, litellm.BadRequestError),
        ):
            try:
                ask(name, **changed)
            except kind:
                continue
            raise AssertionError(f"{name} {changed}: no {kind.__name__}")
        try:
            litellm.completion(
                model=name.replace(MODEL, "other"), api_base=f"{URL}/v1", api_key=KEY, messages=CHAT, max_retries=0
            )
        except litellm.NotFoundError:
            continue
        raise AssertionError(f"{name}: an unknown model is no NotFoundError")


finish([text_and_usage, streams, options, tools, structured_output, text_completions, errors])
