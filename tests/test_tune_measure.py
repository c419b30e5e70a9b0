"""One launch with real processes: a small server stands in for the engine."""

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from surespec.core import BASELINE
from surespec.engines.process import free_port, start_server
from surespec.errors import BundleError, InputFileError, Interrupted, ModelError
from surespec.store import Bundle
from surespec.tune import TuneProgress, tune
from surespec.tune_measure import MAX_REMEDIES, EngineMeasure
from surespec.tune_plan import TuneOptions, make_arm, plan_tune

SERVER = textwrap.dedent(
    '''
    """An OpenAI-compatible stream of 10 tokens: python server.py PORT DELAY_S DIES_AFTER."""
    import json, os, sys, time
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    port, delay, left = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def send(self, body, kind):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.send(json.dumps({"data": [{"id": "m"}]}).encode(), "application/json")

        def do_POST(self):
            global left
            left -= 1
            if left == 0:
                print("error: out of memory", flush=True)
                os._exit(9)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for i in range(5):
                time.sleep(delay)
                chunk = {"choices": [{"delta": {"content": f"w{i} "}, "finish_reason": "length" if i == 4 else None}]}
                self.wfile.write(f"data: {json.dumps(chunk)}\\n\\n".encode())
            usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 10}}
            self.wfile.write(f"data: {json.dumps(usage)}\\n\\ndata: [DONE]\\n\\n".encode())
            self.close_connection = True

        def log_message(self, *_):
            return

    if left < 0:
        print("error: head for hidden size 64, the model has 576", flush=True)
        sys.exit(1)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    '''
)


@dataclass
class StandIn:
    """An engine whose arms with a drafter are faster, or end early."""

    script: Path
    dies_after: int = 10_000
    fails_once: bool = False
    name: str = "stand-in"
    k_by_batch_size: bool = False

    def prepare(self, arms, progress):
        assert arms[0].is_baseline

    def mended(self, arm, remedy):
        return self if remedy.name == "again" else None

    def command(self, arm, port=8000):
        return ["stand-in", arm.name, str(port)]

    def start(self, arm, log_path, on_stage=None):
        port = free_port()
        delay, dies = ("0.004", 10_000) if arm.is_baseline else ("0.001", self.dies_after)
        if self.fails_once and not arm.is_baseline:
            self.fails_once, dies = False, -1
        argv = [sys.executable, str(self.script), str(port), delay, str(dies)]
        return start_server(argv, port=port, log_path=log_path, timeout_s=30, on_stage=on_stage)


class Recorder(TuneProgress):
    def __init__(self):
        self.stages, self.phases, self.notes = [], set(), []

    def note(self, text):
        self.notes.append(text)

    def stage(self, text):
        self.stages.append(text)

    def benching(self, phase, concurrency, done, total):
        self.phases.add((phase, concurrency))


@pytest.fixture
def stand_in(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    return StandIn(script)


@pytest.fixture
def plan(tmp_path):
    options = TuneOptions(
        out=tmp_path / "run", concurrency=(1, 2), prompts="quick", num_prompts=4, output_len=10, methods=("ngram",)
    )
    return plan_tune(options)


NGRAM = make_arm("ngram", 5)


def children():
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


def test_a_launch_is_measured_and_its_server_gone(stand_in, plan, tmp_path):
    before, traces, progress = children(), [], Recorder()
    launch = EngineMeasure(stand_in, plan, progress)(BASELINE, 0, tmp_path, lambda c, t: traces.append((c, t.ok)))
    assert launch.status == "ok"
    assert [run.concurrency for run in launch.runs] == [1, 2]
    assert launch.runs[0].output_tokens == 40
    assert launch.start_duration_s > 0
    assert launch.command == "stand-in baseline 8000"
    assert sorted(traces) == [(1, True)] * 4 + [(2, True)] * 4
    assert progress.stages[-1] == "stopping"
    assert ("run", 2) in progress.phases
    assert children() == before


def test_a_start_that_fails_is_a_failed_launch(stand_in, plan, tmp_path):
    stand_in.dies_after = -1
    launch = EngineMeasure(stand_in, plan, Recorder())(NGRAM, 1, tmp_path, lambda *_: None)
    assert launch.status == "failed"
    assert "hidden size 64" in launch.failure


def test_a_server_that_dies_while_measured_is_a_failed_launch_with_its_last_words(stand_in, plan, tmp_path):
    stand_in.dies_after = 4
    launch = EngineMeasure(stand_in, plan, Recorder())(NGRAM, 1, tmp_path, lambda *_: None)
    assert launch.status == "failed"
    assert "out of memory" in launch.failure


def test_a_failed_start_is_tried_again_by_its_remedy_and_told(stand_in, plan, tmp_path, monkeypatch):
    stand_in.fails_once = True
    monkeypatch.setattr("surespec.tune.engine_for", lambda _: stand_in)
    progress = Recorder()
    judged = tune(plan.options, progress)
    assert judged.verdict != "failed"
    failed = [launch for launch in judged.launches if launch.status == "failed"]
    assert [launch.arm for launch in failed] == ["ngram-k5"]
    again = judged.launches[failed[0].index + 1]
    assert (again.arm, again.status, again.tried) == ("ngram-k5", "ok", ("again",))
    assert any("ngram-k5 failed" in note and "Trying again" in note for note in progress.notes)


def test_an_arm_that_keeps_failing_comes_to_an_end(stand_in, plan, monkeypatch):
    stand_in.dies_after = -1
    monkeypatch.setattr("surespec.tune.engine_for", lambda _: stand_in)
    judged = tune(plan.options, Recorder())
    assert judged.verdict == "failed"
    assert 2 <= [launch.arm for launch in judged.launches].count("ngram-k5") <= 1 + MAX_REMEDIES
    assert any("Tried: again" in warning for warning in judged.warnings)


def test_a_server_that_dies_late_in_a_run_does_not_count_as_measured(stand_in, plan, tmp_path):
    stand_in.dies_after = 8  # the check, the warm-up and some of the run have been answered by then
    launch = EngineMeasure(stand_in, plan, Recorder())(NGRAM, 1, tmp_path, lambda *_: None)
    assert (launch.status, launch.failure_kind) == ("failed", "crash_under_load")


def test_ctrl_c_leaves_no_server(stand_in, plan, tmp_path):
    before = children()

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, Interrupted)):
        EngineMeasure(stand_in, plan, Recorder())(BASELINE, 0, tmp_path, interrupt)
    assert children() == before


def test_a_whole_tune_with_real_processes(stand_in, plan, monkeypatch):
    monkeypatch.setattr("surespec.tune.engine_for", lambda _: stand_in)
    before = children()
    judged = tune(plan.options)
    assert judged.verdict != "failed"
    assert set(judged.ratios) == {"c1", "c2"}
    assert judged.command.startswith("stand-in")
    bundle = Bundle.open(plan.options.out)
    assert all((bundle.launch_dir(launch.index, launch.arm) / "server.log").exists() for launch in bundle.launches())
    assert bundle.launches(with_traces=True)[0].runs[0].traces
    assert bundle.problems == []
    assert children() == before


def test_files_that_are_missing_are_said_before_anything_is_written(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x")
    with pytest.raises(ModelError, match="no-such-head"):
        tune(TuneOptions(model=str(model), eagle3_head="no-such-head", out=tmp_path / "run"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(InputFileError, match="2"):
        tune(TuneOptions(model=str(model), prompts=str(prompts), out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_full_is_one_clear_error_and_no_server(stand_in, plan, monkeypatch):
    monkeypatch.setattr("surespec.tune.engine_for", lambda _: stand_in)
    before = children()

    def full(*_):
        raise BundleError("the disk is full.")

    monkeypatch.setattr("surespec.store.append_line", lambda path, _: full() if "traces" in path.name else None)
    monkeypatch.setattr("surespec.store.Bundle.write_launch", full)
    with pytest.raises(BundleError, match="disk is full"):
        tune(plan.options)
    assert children() == before
