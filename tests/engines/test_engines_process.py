"""Server processes: ready only after a real answer, failures explained by the log, and nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from surespec.core import BASELINE, Arm
from surespec.engines import make_engine
from surespec.engines.base import shell_text
from surespec.engines.process import free_port, group_members, last_words, port_is_free, start_server
from surespec.errors import ConfigError, EngineError, PortInUseError

SERVER = textwrap.dedent(
    '''
    """A server with faults: python server.py PORT MODE."""
    import json, signal, subprocess, sys, time
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    port, mode = int(sys.argv[1]), sys.argv[2]
    refusals = 2 if mode == "loads" else 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def send(self, status, body, kind="application/json"):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.send(200, json.dumps({"data": [{"id": "m"}]}).encode())

        def do_POST(self):
            global refusals
            self.rfile.read(int(self.headers["Content-Length"]))
            if refusals:
                refusals -= 1
                return self.send(503, b"{}")
            if mode == "dies":
                print("RuntimeError: not supported on this CPU", flush=True)
                import os
                os._exit(3)
            if mode == "killed":
                import os, signal
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "error":
                body = {"error": {"message": "the engine core is gone"}}
            elif mode == "empty":
                body = {"choices": []}
            elif mode == "refuses":
                return self.send(400, b'{"error": {"message": "no chat template"}}')
            else:
                body = {"choices": [{"delta": {"content": "hi"}}]}
            text = ": comment\\n\\ndata: " + json.dumps(body) + "\\n\\ndata: [DONE]\\n\\n"
            self.send(200, text.encode(), "text/event-stream")

        def log_message(self, *_):
            return

    if mode == "early":
        print("Traceback (most recent call last):\\n  File x\\nValueError: bad head\\n    ^^^^", flush=True)
        sys.exit(2)
    if mode == "hangs":
        time.sleep(60)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    '''
)


@pytest.fixture
def launch(tmp_path):
    """Start the server above in a mode; whatever a test does, it is stopped."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    started = []

    def go(mode, timeout_s=20.0, port=None):
        port = port or free_port()
        argv = [sys.executable, str(script), str(port), mode]
        stages = []
        server = start_server(argv, port=port, log_path=tmp_path / "log", timeout_s=timeout_s, on_stage=stages.append)
        server.stages, server.port = stages, port
        started.append(server)
        return server

    yield go
    for server in started:
        server.stop()


@pytest.mark.parametrize("mode", ["works", "loads"])
def test_a_server_is_ready_after_a_real_answer_and_gone_after_stop(launch, mode):
    server = launch(mode)
    assert server.alive()
    assert server.stages == ["starting", "loading", "answering a first request"]
    assert server.start_duration_s > 0
    assert not port_is_free(server.port)
    server.stop()
    assert not server.alive()
    assert not psutil.pid_exists(server.pid)
    assert port_is_free(server.port)
    server.stop()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("early", "ValueError: bad head"),
        ("dies", "not supported on this CPU"),
        ("error", "the engine core is gone"),
        ("killed", "killed by SIGKILL, perhaps for lack of memory"),
        ("empty", "without a token"),
        ("refuses", "no chat template"),
    ],
)
def test_a_failed_start_says_why_and_leaves_nothing(launch, mode, words):
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with pytest.raises(EngineError, match=words) as caught:
        launch(mode)
    assert "log" in caught.value.hint
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


def test_a_server_that_never_answers_is_given_up(launch):
    with pytest.raises(EngineError, match="did not answer in time"):
        launch("hangs", timeout_s=0.5)


def test_a_stubborn_server_and_its_children_are_killed(launch, monkeypatch):
    monkeypatch.setattr("surespec.engines.process.STOP_GRACE_S", 0.3)
    server = launch("stubborn")
    children = psutil.Process(server.pid).children(recursive=True)
    assert len(children) == 2, "the server, led by the guard, and its child"
    server.stop()
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_a_port_in_use_is_refused_before_anything_starts(launch):
    server = launch("works")
    with pytest.raises(PortInUseError, match=str(server.port)):
        launch("works", port=server.port)
    assert server.alive()


def test_a_program_that_does_not_exist(tmp_path):
    with pytest.raises(EngineError, match="no-such-program"):
        start_server(["no-such-program"], port=free_port(), log_path=tmp_path / "log", timeout_s=5)


def test_workers_of_a_killed_server_end_with_it(launch):
    server = launch("stubborn")
    main, worker = sorted(psutil.Process(server.pid).children(recursive=True), key=lambda p: p.create_time())
    main.kill()
    for _ in range(100):
        if not server.alive():
            break
        time.sleep(0.05)
    assert server.exit_code == -signal.SIGKILL, "the guard ends as the server did"
    assert group_members(server.pid) == [], "engines leave their workers behind; the guard does not"
    server.stop()
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_the_log_tells_the_stages_and_is_kept_without_secrets(tmp_path):
    script = tmp_path / "server.py"
    script.write_text("print('Loading weights, token hf_" + "x" * 30 + "', flush=True)\n" + SERVER)
    port, stages = free_port(), []
    server = start_server(
        [sys.executable, str(script), str(port), "works"],
        port=port,
        log_path=tmp_path / "log",
        timeout_s=20,
        on_stage=stages.append,
        stage_of=lambda line: "reading weights" if line.startswith("Loading weights") else None,
    )
    server.stop()
    assert stages == ["starting", "loading", "reading weights", "answering a first request"]
    log = (tmp_path / "log").read_text()
    assert "Loading weights" in log
    assert "hf_x" not in log


@pytest.mark.parametrize(
    ("mode", "kind", "moment"),
    [
        ("dies", "crash_first_request", "first_request"),
        ("killed", "host_oom", "first_request"),
        ("hangs", "hang", "start"),
        ("early", "unknown", "start"),
    ],
)
def test_a_failed_start_has_a_kind(launch, mode, kind, moment):
    with pytest.raises(EngineError) as caught:
        launch(mode, timeout_s=1.0 if mode == "hangs" else 20.0)
    assert (caught.value.failure.kind, caught.value.failure.moment) == (kind, moment)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux only")
def test_the_server_dies_with_a_killed_surespec(tmp_path):
    script, log = tmp_path / "server.py", tmp_path / "log"
    script.write_text(SERVER)
    port = free_port()
    code = (
        "import sys, time, pathlib\n"
        "from surespec.engines.process import start_server\n"
        f"s = start_server([sys.executable, {str(script)!r}, '{port}', 'stubborn'], port={port},"
        f" log_path=pathlib.Path({str(log)!r}), timeout_s=20)\n"
        "print(s.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert len(family) == 3, "guard, server, worker"
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        if group_members(pid) == []:
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"outlived surespec: {group_members(pid)}")
    assert port_is_free(port)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", ""),
        ("loading\n\x1b[31mError: out of memory\x1b[0m\nhint: use less\n\n", "Error: out of memory"),
        ("loading\nready\n", "ready"),
        ("  x = y\n  ^^^^^\n", "x = y"),
    ],
)
def test_last_words(tmp_path, log, words):
    path = tmp_path / "log"
    path.write_text(log)
    assert last_words(path) == words
    assert last_words(Path(tmp_path / "none")) == ""


def test_the_command_for_people_reads_back_from_a_shell():
    config = {"method": "eagle3", "model": "my head's dir", "num_speculative_tokens": 3}
    arm = Arm(name="eagle3-k3", method="eagle3", num_speculative_tokens=3, speculative_config=config)
    engine = make_engine("local", model="smollm2-135m", precision="int8")
    text = shell_text(engine.command(arm))
    parts = subprocess.run(["sh", "-c", f"printf '%s\\n' {text}"], capture_output=True, text=True).stdout.splitlines()
    assert parts == engine.command(arm)
    assert parts[:2] == ["surespec", "serve"]
    assert '"model":"my head\'s dir"' in parts[-1]
    assert "--speculative-config" not in engine.command(BASELINE)


def test_an_unknown_engine_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="warp") as caught:
        make_engine("warp", model="m")
    assert "local" in caught.value.hint
