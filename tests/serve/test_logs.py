"""The logs of a real service: JSON lines, the request's id in them, and no word of the user's."""

import json
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif("DFLASH2_URL" in os.environ, reason="the logs of a service elsewhere cannot be read")


def logs(pattern):
    import ray

    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    return {path.name: path.read_text(encoding="utf-8").splitlines() for path in folder.glob(pattern)}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answered_request_is_one_line_without_its_text(idle, stream):
    request_id = f"of-the-test-{stream}"
    body = {"prompt": "Purple wombats", "max_tokens": 5, "ignore_eos": True, "temperature": 0, "stream": stream}
    assert idle.http.post("/v1/completions", json=body, headers={"x-request-id": request_id}).status_code == 200
    lines = [json.loads(line) for lines in logs("serve/replica_default_ingress_*.log").values() for line in lines]
    (answered,) = [line for line in lines if line.get("request_id") == request_id and "num_completion_tokens" in line]
    assert answered["message"].startswith(
        f"request {request_id} answered: completion, 7 prompt and 5 completion tokens"
    )
    assert (answered["num_completion_tokens"], answered["finish_reasons"], answered["streamed"]) == (
        5,
        ["length"],
        stream,
    )
    assert 0 <= answered["time_to_first_token_s"] <= answered["end_to_end_s"]
    everything = "\n".join(line for lines in (logs("worker-*") | logs("serve/*.log")).values() for line in lines)
    assert request_id in everything
    assert "wombat" not in everything


def test_workers_write_json_lines_with_their_role(idle):
    lines = [line for lines in logs("worker-*.err").values() for line in lines if '"role": "target rank 0"' in line]
    assert lines
    assert {json.loads(line)["levelname"] for line in lines} <= {"INFO", "WARNING", "ERROR"}
