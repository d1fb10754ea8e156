"""The log of a worker process, as text and as JSON."""

import io
import json
import logging
import os
import sys

import pytest

from dflash2_ray.core.log_lines import write_logs


@pytest.fixture
def package():
    """The package's logger, put back afterwards."""
    logger = logging.getLogger("dflash2_ray")
    before = (logger.handlers, logger.level, logger.propagate)
    yield logging.getLogger("dflash2_ray.runtime.somewhere")
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_json_lines_have_role_request_and_traceback(package, monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    write_logs("json", "target rank 1")
    package.debug("not this one")
    package.info("%d layers", 6)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        package.exception("request %s: failed", "r1", extra={"request_id": "r1"})
    first, second = [json.loads(line) for line in written.getvalue().splitlines()]
    assert (first["message"], first["levelname"], first["role"], first["process"]) == (
        "6 layers",
        "INFO",
        "target rank 1",
        os.getpid(),
    )
    assert first.keys() - {"timestamp_ns"} == {
        "asctime",
        "levelname",
        "message",
        "filename",
        "lineno",
        "process",
        "role",
    }
    assert (second["message"], second["request_id"], second["filename"]) == (
        "request r1: failed",
        "r1",
        "test_log_lines.py",
    )
    assert "ValueError: two\nlines" in second["exc_text"]


def test_text_lines_name_the_role_once(package, monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    write_logs("text", "drafter")
    write_logs("text", "drafter")
    package.warning("lost")
    (line,) = written.getvalue().splitlines()
    assert line.startswith("WARNING ")
    assert line.endswith(f" drafter {os.getpid()} -- lost")
