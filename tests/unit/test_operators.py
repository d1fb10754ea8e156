"""What a start-up says of its operators is what they do."""

import pytest
import torch

from dflash2_kernels import backend, catalogue, triton_import
from dflash2_ray.models.attention import plan_attention, runs_by_row
from dflash2_ray.models.attention_batch import AttentionBatch, Span
from dflash2_ray.runtime.operators import report_operators
from dflash2_ray.serving.banner import banner


@pytest.fixture
def fresh_choice():
    backend._choose.cache_clear()
    yield
    backend._choose.cache_clear()


def test_every_operator_is_in_the_report():
    names = {module.OPERATOR.name for module in catalogue.MODULES}
    assert set(report_operators("cpu", "float32", drafts=True)) == names | {"linear"}
    plain = report_operators("cpu", "float32", drafts=False)
    assert "paged_attention" in plain
    assert not {"grouped_conv", "selector_walk", "context_ingest"} & set(plain)


def test_a_gpu_takes_kernels_where_the_service_calls_them(monkeypatch, fresh_choice):
    monkeypatch.setattr(triton_import, "AVAILABLE", True)
    found = report_operators("cuda", "bfloat16", drafts=True)
    assert found == {name: "plain" if name == "linear" else "triton" for name in found}
    backend._choose.cache_clear()
    monkeypatch.setattr(triton_import, "AVAILABLE", False)
    assert "triton" not in report_operators("cuda", "bfloat16", drafts=True).values()


def test_a_running_engine_tells_and_its_banner_has_a_line(scripted):
    facts = scripted.make_loop(scripted.Drafter()).describe()
    by_row = runs_by_row(torch.device("cpu"), 64)
    assert facts["operators"]["paged_attention"] == ("avx512, row by row" if by_row else "torch, whole tiles")
    batch = AttentionBatch(torch.arange(2), (Span(0, 2, 2, (0,)),), 4)
    plan = plan_attention(batch, {None}, 1, by_row=by_row)
    assert (plan.paged, plan.rows is not None) == (None, by_row)  # … which is what runs
    (line,) = [line for line in banner(facts, "http://here").splitlines() if "operators" in line]
    for name, implementation in facts["operators"].items():
        assert name in line.split(f"{implementation}: ")[1].split(" · ")[0]
