"""langchain-openai's ChatOpenAI against the service."""

from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from scenarios import KEY, MODEL, URL, finish, same

QUESTION = [HumanMessage("Write a short story about a shy bird.")]


class Weather(BaseModel):
    """The weather."""

    sky: Literal["clear", "cloudy"]
    warm: bool


@tool
def report_weather(sky: Literal["clear", "cloudy"], warm: bool) -> str:
    """Report the weather."""
    return f"{sky} {warm}"


def model(**options) -> ChatOpenAI:
    """The service as a chat model."""
    asked = {"temperature": 0, "max_tokens": 200, **options}
    return ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, max_retries=0, stream_usage=True, **asked)


def invoke():
    """Text, counts and the finish reason."""
    answer = model(max_tokens=30).invoke(QUESTION)
    assert answer.content
    same(answer.usage_metadata["output_tokens"], 30, "output tokens")
    same(answer.response_metadata["finish_reason"], "length", "finish reason")
    same(answer.response_metadata["model_name"], MODEL, "model")


def stream_with_usage():
    """Chunks add up to the whole answer, usage included once."""
    whole = model(max_tokens=30).invoke(QUESTION)
    total = None
    for chunk in model(max_tokens=30).stream(QUESTION):
        total = chunk if total is None else total + chunk
    same(total.content, whole.content, "text")
    same(total.usage_metadata["output_tokens"], 30, "output tokens")


def batches():
    """Several conversations at once."""
    answers = model(max_tokens=10).batch([QUESTION, [HumanMessage("Say hi.")]])
    assert all(answer.content for answer in answers)


def logprobs_stop_and_n():
    """Options that langchain passes on."""
    answer = model(max_tokens=10).bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    same(len(answer.response_metadata["logprobs"]["content"]), 10, "logprobs")
    full = model(max_tokens=30).invoke(QUESTION).content
    same(model(max_tokens=30).invoke(QUESTION, stop=[full[10:14]]).content, full[: full.index(full[10:14])], "stop")
    same(len(model(max_tokens=10, n=2, temperature=1.0).generate([QUESTION]).generations[0]), 2, "choices")


def tools():
    """A forced call, its result in the next turn, and a streamed call."""
    bound = model().bind_tools([report_weather], tool_choice="any")
    answer = bound.invoke(QUESTION)
    (call, *_) = answer.tool_calls
    same(call["name"], "report_weather")
    result = report_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    follow = [*QUESTION, answer, *(ToolMessage("done", tool_call_id=one["id"]) for one in answer.tool_calls)]
    assert isinstance(model(max_tokens=8).invoke(follow), AIMessage)
    total = None
    for chunk in bound.stream(QUESTION):
        total = chunk if total is None else total + chunk
    same([one["args"] for one in total.tool_calls], [one["args"] for one in answer.tool_calls], "streamed call")


def structured_output():
    """By JSON schema, by function call."""
    for method in ("json_schema", "function_calling"):
        same(type(model().with_structured_output(Weather, method=method).invoke(QUESTION)), Weather, method)


finish([invoke, stream_with_usage, batches, logprobs_stop_and_n, tools, structured_output])
