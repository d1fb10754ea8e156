"""The command line as its user meets it: help, results on standard output, errors on standard error, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash2_ray import cli

COMMAND = str(Path(sys.executable).with_name("dflash2-ray"))


def run_process(*words):
    """The installed command, as its user starts it: what this process has imported already does not help it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([COMMAND, *words], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def run(capsys, monkeypatch):
    """The same command in this process: returncode, stdout, stderr."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["dflash2-ray", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        wrote = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code, stdout=wrote.out, stderr=wrote.err)

    return call


def test_help_names_every_command(run):
    done = run("--help")
    assert done.returncode == 0
    for command in ("check", "generate", "chat", "bench", "verify", "status"):
        assert command in done.stdout
    assert "max_num_seqs" in run("check", "--keys").stdout


def test_the_page_of_a_degraded_service_shows_every_unit():
    """What no test can bring about in a second: a drafter that is gone, ranks that were replaced, a unit that says nothing."""
    from dflash2_ray.cli.status import page

    worker = {
        "role": "target rank 0",
        "host": "10.0.0.7",
        "pid": 31,
        "gpu_ids": ["0", "1"],
        "node_id": "abcdefghijkl",
        "num_calls": 9,
    }
    first = {
        "unit": 0,
        "replica": "x1",
        "state": "serving",
        "why": None,
        "generation": 3,
        "num_rebuilds": 3,
        "num_drafter_restarts": 2,
        "degraded": ["drafter"],
        "workers": [worker, {"role": "drafter", "num_calls": 0}],
        "num_requests_running": 4,
        "num_requests_waiting": 1,
        "num_pages": 800,
        "kv_usage": 0.25,
        "acceptance_length": 5.914,
        "tokens_per_s": 1234.5,
    }
    silent = {"state": "not serving", "why": "no answer within 5 s"}
    report = {
        "status": "degraded",
        "why": "a unit: no answer within 5 s; unit 0: no drafter",
        "model": "m",
        "units": [first, silent],
        "serve": {"application": "RUNNING", "units": {"RUNNING": 2, "STARTING": 1}},
    }
    assert list(page("http://there", report)) == [
        "m at http://there: degraded (a unit: no answer within 5 s; unit 0: no drafter)",
        "Serve says: application running; units: 2 running, 1 starting",
        "",
        "unit 0 (x1): serving · generation 3 of its ranks · ranks replaced 3 times · drafter restarted 2 times · no drafter",
        "  4 requests running, 1 waiting · KV 25% of 800 pages · acceptance length 5.91 · 1,234 tokens/s",
        "  role           host      GPU  pid  node",
        "  target rank 0  10.0.0.7  0,1  31   abcdefgh",
        "  drafter        ?         -    ?    ?",
        "",
        "a unit: not serving: no answer within 5 s",
    ]


def test_check_resolves_without_loading():
    done = run_process("check", "max_num_seqs=3", "--json", "-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["config"]["max_num_seqs"] == 3
    assert report["config"]["num_speculative_tokens"] == 7
    assert report["target"]["num_layers"] == 6
    assert report["drafter"]["draft_block_size"] == 8
    assert {name for name, _ in report["memory"]} == {"target weights", "drafter weights", "key/value pages"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["dtyp=float32"], "did you mean 'dtype'"),
        (["max_num_seqs=x"], "max_num_seqs"),
        (["target=/no/such/folder"], "/no/such/folder"),
        (["target=nobody/nothing"], "nobody/nothing"),
        (["drafter=embedded"], "drafter"),
        (["num_speculative_tokens=9"], "at most 7, got 9"),
        (["max_model_len=4096"], "2048"),
        (["num_kv_pages=3"], "num_kv_pages"),
        (["device=cuda"], "device"),
        (["word"], "KEY=VALUE"),
    ],
)
@pytest.mark.parametrize("command", ["check", "verify"])
def test_a_bad_configuration_exits_with_2_and_one_line(run, command, settings, says):
    done = run(command, *settings)
    assert done.returncode == 2
    assert says in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_bad_configuration_ends_the_process_with_2():
    done = run_process("check", "dtyp=float32")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "did you mean 'dtype'" in done.stderr


def test_generate_writes_only_the_text_to_standard_output(run):
    done = run_process("generate", "def add(a, b):\n", "dtype=float32", "--temperature", "0", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert "acceptance length" in done.stderr
    assert "tokens" not in done.stdout
    plain = run(
        "generate",
        "def add(a, b):\n",
        "dtype=float32",
        "--temperature",
        "0",
        "--max-tokens",
        "12",
        "--num-speculative-tokens",
        "0",
    )
    assert plain.stdout == done.stdout
    assert "plain decoding" in plain.stderr


def test_a_refused_request_exits_with_1(run):
    done = run("generate", "", "dtype=float32")
    assert done.returncode == 1
    assert "no token" in done.stderr
    assert run("generate", "a", "--temperature", "-1").returncode == 1


def test_chat_answers_once_or_holds_a_conversation(run, monkeypatch):
    words = ("dtype=float32", "--temperature", "0", "--max-tokens", "12")
    once = run("chat", "Spell the word cake.", *words)
    assert once.returncode == 0, once.stderr
    assert "12 tokens" in once.stderr
    said = iter(["Spell the word cake.", "Once more.", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    held = run("chat", *words)
    assert held.returncode == 0, held.stderr
    assert held.stdout.startswith(once.stdout)
    assert held.stderr.count("12 tokens") == 2


def test_verify_and_bench_report(run, tmp_path):
    report = tmp_path / "verify.json"
    words = (
        "--num-prompts",
        "6",
        "--max-tokens",
        "24",
        "--checks",
        "identity,law",
        "--samples",
        "40",
        "--law-prompts",
        "1",
    )
    done = run("verify", "dtype=float32", *words, "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    told = json.loads(report.read_text())
    assert told["options"] is None
    assert [law["passed"] for law in told["laws"]] == [True, True]
    runs = told["identity"]["runs"]
    assert [one["num_equal"] for one in runs] == [6, 6, 6]
    assert runs[1]["num_accepted_draft_tokens"] > 0
    done = run_process(
        "bench",
        "draft_width=fixed",
        "--num-prompts",
        "2",
        "--repeats",
        "1",
        "--max-tokens",
        "16",
        "--concurrency",
        "1,2",
        "--json",
        "-",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout[done.stdout.index("{") :])["results"]
    assert [row["concurrency"] for row in rows] == [1, 2]
    for row in rows:
        assert row["speculative"]["acceptance_length"] > 1.5
        assert len(row["speculative"]["acceptance_by_position"]) == 7
        assert row["speedup"] > 0


def test_prompts_from_a_file(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("def f(x):\nimport os\n")
    done = run_process(
        "verify", "dtype=float32", "--prompts", str(path), "--max-tokens", "8", "--checks", "identity", "--json", "-"
    )
    assert done.returncode == 0, done.stderr
    assert "2 of 2 texts" in done.stderr
    assert json.loads(done.stdout)["num_prompts"] == 2
    missing = run("verify", "--prompts", str(tmp_path / "none.json"))
    assert missing.returncode == 2
    assert "none.json" in missing.stderr


def test_bench_compares_widths(run):
    words = (
        "bench",
        "--widths",
        "0,7,auto",
        "--num-prompts",
        "2",
        "--repeats",
        "2",
        "--max-tokens",
        "12",
        "--concurrency",
        "1,2",
        "--json",
        "-",
    )
    done = run(*words)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout[done.stdout.index("{") :])["results"]
    assert [row["concurrency"] for row in rows] == [1, 2]
    for row in rows:
        assert set(row["tokens_per_s"]) == {"0", "7", "auto"}
        assert row["best_fixed"] in ("0", "7")
        assert row["auto_to_best"] > 0
    wrong = run("bench", "--widths", "0,9")
    assert wrong.returncode == 2
    assert "num_speculative_tokens=7" in wrong.stderr
