"""The spans of a request, on a real unit: through the ingress's own code and through `Client`, both in this process."""

import asyncio

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dflash2_ray.config import ServiceConfig

TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0x00F067AA0BA902B7
TRACEPARENT = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"
BODY = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture
def spans(monkeypatch):
    """Ended spans, with a tracer provider that only this test sees; the SDK's default sampler follows the parent."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter.get_finished_spans
    provider.shutdown()


@pytest.fixture
def post(idle):
    """POST to the ingress's routes in this process; the unit behind them is the service's."""
    from ray import serve

    from dflash2_ray.serving.ingress import Ingress
    from dflash2_ray.serving.routes import _this_replica, build_api

    def call(path, body, headers):
        async def one():
            ingress = Ingress.__new__(Ingress)
            handles = (serve.get_deployment_handle(name, "default") for name in ("unit", "bookkeeper"))
            await ingress.__init__(ServiceConfig(**idle.settings), *handles, idle.url)
            api = build_api()
            api.dependency_overrides[_this_replica] = lambda: ingress
            async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://test") as http:
                return await http.post(path, json=body, headers=headers)

        return asyncio.run(one())

    return call


def tree(spans):
    """(the request's span, its children by name), times checked."""
    (whole,) = [span for span in spans if span.name not in ("queue", "prefill", "draft", "transfer", "verify")]
    phases = {span.name: span for span in spans if span is not whole}
    assert len(phases) == len(spans) - 1
    at = whole.start_time
    for span in phases.values():
        assert span.parent.span_id == whole.context.span_id
        assert span.context.trace_id == whole.context.trace_id
        assert at <= span.start_time <= span.end_time <= whole.end_time
        assert 0 <= span.attributes["dflash2.duration_s"] <= (whole.end_time - whole.start_time) / 1e9
        at = span.end_time
    return whole, phases


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_span_with_its_phases(spans, post, stream):
    answer = post("/v1/completions", {**BODY, "stream": stream}, {"traceparent": TRACEPARENT, "x-request-id": "r1"})
    assert answer.status_code == 200
    whole, phases = tree(spans())
    assert whole.name == "text_completion dflash2-embedded"
    assert (whole.context.trace_id, whole.parent.span_id) == (TRACE_ID, PARENT_ID)
    assert list(phases) == ["queue", "prefill", "draft", "transfer", "verify"]
    says = whole.attributes
    assert (says["gen_ai.operation.name"], says["gen_ai.request.model"]) == ("text_completion", "dflash2-embedded")
    assert (says["gen_ai.request.max_tokens"], says["gen_ai.request.temperature"]) == (24, 0)
    assert says["dflash2.request_id"].startswith("r1-")
    assert (says["gen_ai.usage.output_tokens"], says["gen_ai.response.finish_reasons"]) == (24, ("length",))
    assert says["dflash2.num_accepted_draft_tokens"] > 0
    assert says["dflash2.num_resumes"] == 0
    steps = says["dflash2.num_spec_steps"] + says["dflash2.num_plain_steps"]
    assert phases["verify"].attributes["dflash2.num_steps"] == steps
    assert phases["draft"].attributes["dflash2.num_steps"] == says["dflash2.num_spec_steps"]
    assert phases["prefill"].attributes["dflash2.num_steps"] == 1
    assert phases["transfer"].attributes["dflash2.duration_s"] == 0  # the drafter is in the target's process
    assert all(phases[name].attributes["dflash2.duration_s"] > 0 for name in ("queue", "prefill", "draft", "verify"))
    assert not any("upon" in str(value) for span in spans() for value in span.attributes.values())


def test_a_stop_string_and_plain_decoding(spans, post):
    """A text that ends at the front has its phases too; without drafts there is no drafting."""
    whole_text = post("/v1/completions", {**BODY, "speculative": {"enabled": False}}, {}).json()["choices"][0]["text"]
    stop = whole_text[10:14]
    post("/v1/completions", {**BODY, "stop": [stop], "speculative": {"enabled": False}}, {})
    stopped = [span for span in spans() if span.context.trace_id == spans()[-1].context.trace_id]
    whole, phases = tree(stopped)
    assert whole.parent is None
    assert list(phases) == ["queue", "prefill", "verify"]
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert whole.attributes["dflash2.skipped_reason"] == "requested"


def test_refused_and_unsampled_requests(spans, post):
    refused = post("/v1/completions", {**BODY, "max_tokens": 100_000}, {"traceparent": TRACEPARENT})
    assert refused.status_code == 400
    whole, phases = tree(spans())
    assert phases == {}
    assert (whole.attributes["error.type"], whole.status.status_code) == (
        "ContextLengthExceeded",
        trace.StatusCode.ERROR,
    )
    assert post("/v1/completions", BODY, {"traceparent": TRACEPARENT[:-1] + "0"}).status_code == 200
    assert len(spans()) == 1


def test_client_traces_under_the_span_in_hand(spans, idle, engine):
    from dflash2_ray import Client

    client = Client()
    with trace.get_tracer("of the test").start_as_current_span("caller") as caller:
        (got,) = asyncio.run(client.agenerate("Once upon a time", temperature=0, max_tokens=24))
    (expected,) = engine.generate("Once upon a time", temperature=0, max_tokens=24)
    assert got.token_ids == expected.token_ids
    whole, phases = tree([span for span in spans() if span.name != "caller"])
    assert (whole.name, whole.parent.span_id) == ("generate_content", caller.get_span_context().span_id)
    assert "verify" in phases


@pytest.mark.parametrize("installed", [True, False])
def test_nothing_is_traced_without_a_provider_or_without_the_api(idle, monkeypatch, installed):
    from dflash2_ray import Client
    from dflash2_ray.engine import tracing

    if not installed:
        monkeypatch.setattr(tracing, "_api", lambda: None)
    with tracing.traced("r1", tracing.TraceOrigin("chat", "m", {"traceparent": TRACEPARENT})) as one:
        assert one is None
    (got,) = Client().generate("Once upon a time", temperature=0, max_tokens=4)
    assert len(got.token_ids) == 4
