"""A server that already runs: found, refused, stopped, and always started again as it was."""

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

import toy
from surespec import tune as tune_module
from surespec.core import Launch
from surespec.engines import existing as existing_module
from surespec.engines.containers import running_containers
from surespec.engines.existing import container_of, find_existing, outermost, refuse_existing, unit_of
from surespec.engines.handover import MARKER, handed_over
from surespec.engines.process import free_port, port_is_free
from surespec.engines.server_lines import server_line, server_line_in_shell, shortened
from surespec.errors import EngineError, UsageError
from surespec.store import Bundle
from surespec.tune_existing import check_existing, with_speculation
from surespec.tune_plan import TuneOptions

SERVER = textwrap.dedent(
    """
    import json, os, signal, subprocess, sys
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    port = int(sys.argv[sys.argv.index("--port") + 1])
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.answer(json.dumps({"data": [{"id": "m"}]}).encode(), "application/json")

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            if "--spec-type" in sys.argv and os.environ.get("NEW_ONE_FAILS"):
                os._exit(3)
            text = b'data: {"choices": [{"delta": {"content": "hi"}}]}\\n\\ndata: [DONE]\\n\\n'
            self.answer(text, "text/event-stream")

        def answer(self, body, kind):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            return

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print("listening", os.getpid(), os.environ.get("OWN"), os.getcwd(), os.environ.get("SURESPEC_RUN"), flush=True)
    server.serve_forever()
    """
)


def until(condition, what, seconds=20):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
    return found


@pytest.fixture
def user(tmp_path):
    """Starts a toy `llama-server` that is no child of ours, as a user would; ends all of them afterwards."""
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}\n{SERVER}")
    program.chmod(0o755)
    log, port = tmp_path / "user.log", free_port()
    home = tmp_path / "home"
    home.mkdir()

    def starts(*flags, **env):
        argv = ["../llama-server", "-m", "toy.gguf", "--port", str(port), "--api-key", "sesame", *flags]
        code = (
            "import subprocess, sys; log = open(sys.argv[1], 'a'); "
            "subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)"
        )
        subprocess.run(
            [sys.executable, "-c", code, str(log), *argv],
            cwd=home,
            env={**os.environ, "OWN": "its own", **env},
            check=True,
        )
        until(lambda: mine(port), "the server")
        until(lambda: not port_is_free(port), "its port")
        return mine(port)[0]

    yield SimpleNamespace(starts=starts, port=port, log=log, home=home)

    def left():
        return [p for p in psutil.process_iter(["cmdline"]) if f"{port}" in (p.info["cmdline"] or [])]

    for guard in psutil.Process().children():
        if not gone(guard.pid) and any("restorer.py" in word for word in guard.cmdline()):
            guard.kill()
    for process in left():
        for child in process.children():
            child.kill()
        process.kill()
    until(lambda: not left(), "the end of the servers")


def mine(port):
    return [found for found in find_existing() if found.port == port]


def gone(pid):
    """Whether a process has ended; one that waits to be reaped has."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def lines(user):
    return [line.split() for line in user.log.read_text().splitlines() if line.startswith("listening")]


@pytest.mark.parametrize(
    ("argv", "engine", "port"),
    [
        (["/v/bin/python3.12", "/v/bin/vllm", "serve", "m", "--port=81"], "vllm", 81),
        (["python", "-u", "-X", "dev", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], "vllm", 8000),
        (["./llama-server", "-m", "x.gguf"], "llamacpp", 8080),
        (["python3", "-m", "sglang.launch_server", "--port", "7"], "sglang", 7),
        (["/usr/bin/python", "/usr/local/bin/trtllm-serve", "m"], "trtllm", 8000),
        (["python", "-m", "dynamo.vllm", "--model", "m"], "dynamo", None),
        (["python", "/v/bin/surespec", "serve"], "local", 8000),
        (["VLLM::EngineCore"], "vllm", None),
    ],
)
def test_a_server_is_known_by_its_command_line(argv, engine, port):
    found = server_line(argv)
    assert (found.engine, found.port) == (engine, port)


@pytest.mark.parametrize(
    "argv",
    [[], ["vllm", "bench", "serve"], ["grep", "vllm", "serve"], ["python", "-c", "vllm serve"],
     ["bash", "-c", "vllm serve m"], ["docker", "run", "vllm/vllm-openai", "vllm", "serve"],
     ["surespec", "tune"], ["python"]],
)  # fmt: skip
def test_other_programs_are_no_servers(argv):
    assert server_line(argv) is None


def test_a_containers_shell_text_is_looked_into():
    found = server_line_in_shell(["bash", "-lc", "cd /x && exec vllm serve $MODEL --port 81; echo"])
    assert (found.engine, found.port) == ("vllm", 81)
    assert server_line_in_shell(["bash", "-c", "echo 'unclosed"]) is None


def test_a_shown_command_has_no_secret_and_a_limit():
    text = shortened(["vllm", "serve", "m", "--api-key", "aaa", "bbb", "--hf-token=ccc", *["--flag"] * 60])
    assert not any(secret in text for secret in ("aaa", "bbb", "ccc"))
    assert text.startswith("vllm serve m --api-key <removed>")
    assert len(text) <= 160


def test_only_the_outermost_process_of_each_server_counts():
    assert outermost([10, 11, 12, 20], {11: 10, 12: 11, 10: 1, 20: 5, 5: 1}) == [10, 20]
    assert outermost([3], {3: 4, 4: 3}) == [3]


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/vllm.service\n", ("vllm.service", False)),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/llm.service", ("llm.service", True)),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/tmux-spawn-1.scope", ("", False)),
        ("0::/user.slice/user-1000.slice/session-3.scope", ("", False)),
        ("0::/system.slice/cron.service", ("", False)),
        ("1:name=systemd:/\n0::/", ("", False)),
    ],
)
def test_the_unit_is_the_innermost_group(cgroup, unit):
    assert unit_of(cgroup) == unit


def test_a_container_is_known_by_its_group():
    identity = "ab" * 32
    assert container_of(f"0::/system.slice/docker-{identity}.scope") == identity
    assert container_of(f"4:memory:/docker/{identity}\n") == identity
    assert container_of("0::/user.slice/user-1000.slice/session-3.scope") == ""


def test_a_running_server_is_refused_with_pid_port_and_command_without_secrets(user):
    server = user.starts()
    assert (server.engine, server.port, server.obstacle) == ("llamacpp", user.port, "")
    with pytest.raises(EngineError) as caught:
        refuse_existing([server], stop=False)
    assert f"process {server.pid}, port {user.port}" in caught.value.message
    assert "sesame" not in str(caught.value)
    assert "--stop-existing" in caught.value.hint
    assert caught.value.exit_code == 1
    refuse_existing([server], stop=True)


def test_a_unit_is_refused_with_what_to_type(user, monkeypatch):
    server = user.starts()
    real = existing_module._cgroup
    unit = "0::/system.slice/llm.service"
    monkeypatch.setattr(existing_module, "_cgroup", lambda pid: unit if pid == str(server.pid) else real(pid))
    with pytest.raises(EngineError, match=r"systemd unit llm\.service") as caught:
        refuse_existing(mine(user.port), stop=True)
    assert "systemctl stop llm.service" in caught.value.hint


def test_children_of_surespec_do_not_count(user):
    argv = [str(user.home.parent / "llama-server"), "--port", str(user.port)]
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        until(lambda: not port_is_free(user.port), "its port")
        assert mine(user.port) == []
    finally:
        for process in [*psutil.Process(child.pid).children(), child]:
            process.kill()
        child.wait()


@pytest.mark.parametrize("ending", ["well", "badly", "interrupted"])
def test_it_is_started_again_as_it_was_however_the_run_ends(user, tmp_path, ending):
    server = user.starts()
    said, events = [], []

    def run():
        with handed_over([server], tmp_path, said.append, lambda kind, **more: events.append({"kind": kind, **more})):
            assert port_is_free(user.port)
            assert gone(server.pid)
            assert os.environ[MARKER]
            if ending == "badly":
                raise EngineError("x")
            if ending == "interrupted":
                raise KeyboardInterrupt

    if ending == "well":
        run()
    else:
        with pytest.raises((EngineError, KeyboardInterrupt)):
            run()
    until(lambda: len(lines(user)) == 2, "the second life")
    first, second = lines(user)
    assert first[1] != second[1]
    assert first[2:] == second[2:] == ["its", "own", str(user.home), "None"]  # environment, folder; no marker of ours
    again = mine(user.port)[0]
    assert (again.argv, str(again.pid)) == (server.argv, second[1])
    assert [event["kind"] for event in events] == ["existing_stopped", "existing_restarted"]
    assert "sesame" not in json.dumps(events) + "".join(said)
    assert "its own" not in json.dumps(events) + "".join(said)
    assert "started again as it was" in said[-1]
    os.kill(again.pid, signal.SIGTERM)
    until(lambda: gone(again.pid), "its end by SIGTERM, as before")


def test_one_that_ignores_sigterm_is_killed_and_that_is_said(user, tmp_path, monkeypatch):
    monkeypatch.setattr("surespec.engines.handover.STOP_GRACE_S", 0.5)
    server = user.starts("--stubborn")
    said = []
    with handed_over([server], tmp_path, said.append, lambda *_, **__: None):
        assert gone(server.pid)
    assert any("was killed" in text for text in said)
    until(lambda: len(lines(user)) == 2, "the second life")


def test_a_killed_surespec_still_brings_it_back(user, tmp_path):
    server = user.starts()
    code = (
        "import sys, time, subprocess\n"
        "from pathlib import Path\n"
        "from surespec.engines.existing import find_existing\n"
        "from surespec.engines.handover import handed_over\n"
        "mine = [s for s in find_existing() if s.port == int(sys.argv[1])]\n"
        "with handed_over(mine, Path(sys.argv[2]), print, lambda *a, **k: None):\n"
        "    arm = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1)'], start_new_session=True)\n"
        "    print('stopped', flush=True)\n"
        "    time.sleep(60)\n"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", code, str(user.port), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    for line in killed.stdout:
        if line.startswith("stopped"):
            break
    assert gone(server.pid)
    killed.kill()
    killed.wait()
    killed.stdout.close()
    until(lambda: len(lines(user)) == 2, "the second life")
    until(lambda: (tmp_path / "events.jsonl").exists(), "the event")
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["kind"], event["by"], event["problems"]) == ("existing_restarted", "guard", [])
    assert mine(user.port)[0].argv == server.argv


def test_one_that_something_else_starts_again_is_not_fought_with(user, tmp_path, monkeypatch):
    server = user.starts()
    twin = replace(server, pid=1)
    monkeypatch.setattr("surespec.engines.handover.find_existing", lambda: (twin,))
    with (
        pytest.raises(EngineError, match="something starts it again"),
        handed_over([server], tmp_path, lambda _: None, lambda *_, **__: None),
    ):
        raise AssertionError("the block must not run")
    until(lambda: len(lines(user)) == 2, "the second life")


CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


@pytest.mark.parametrize("fails", [False, True])
def test_apply_leaves_the_new_one_or_puts_the_old_one_back(user, tmp_path, fails):
    server = user.starts(**({"NEW_ONE_FAILS": "1"} if fails else {}))
    said = []
    with handed_over([server], tmp_path, said.append, lambda *_, **__: None) as over:
        assert over.apply(with_speculation(server.argv, CONFIG)) is not fails
    assert "sesame" not in "".join(said)
    if fails:
        assert until(lambda: mine(user.port), "the old server")[0].argv == server.argv
        return
    (now,) = (p for p in psutil.process_iter(["cmdline"]) if str(user.port) in (p.info["cmdline"] or []))
    assert {"--spec-type", "sesame"} <= set(now.info["cmdline"])
    command = next(text for text in said if "go back" in text).split("type: ")[1].split(" (")[0]
    assert command == f"kill {now.pid}"
    subprocess.run(shlex.split(command), check=True)
    until(lambda: [s for s in mine(user.port) if s.argv == server.argv], "the old server")


def test_apply_needs_the_same_engine_and_model(user, monkeypatch):
    server = user.starts()
    monkeypatch.setattr("surespec.tune_existing.find_existing", lambda: (server,))

    def check(engine, command):
        options = TuneOptions(engine=engine, stop_existing=True, apply=True)
        return check_existing(SimpleNamespace(options=options, commands={"baseline": command}))

    assert check("llamacpp", "llama-server -m toy.gguf") == (server,)
    with pytest.raises(UsageError, match="no vllm server"):
        check("vllm", "vllm serve toy.gguf")
    with pytest.raises(UsageError, match=r"serves toy\.gguf, not the one"):
        check("llamacpp", "llama-server -m other.gguf")


@pytest.mark.parametrize(
    "options",
    [{"apply": True, "engine": "vllm"}, {"stop_existing": True},
     {"stop_existing": True, "managed": True, "endpoint": "http://x", "engine": "vllm"}],
)  # fmt: skip
def test_flags_that_do_not_belong_together(options):
    with pytest.raises(UsageError):
        TuneOptions(**options).check()


def test_tune_stops_it_for_the_launches_and_starts_it_again(user, tmp_path, monkeypatch):
    server = user.starts()

    class Fails:
        def __init__(self, *_):
            return

        def mend(self, _arm):
            return None

        engine = property(lambda _self: tune_module.engine_for(TuneOptions()))

        def __call__(self, arm, index, folder, on_trace):
            assert port_is_free(user.port)
            return Launch(index=index, arm=arm.name, status="failed", started_at="2026-01-01T00:00:00Z", failure="no.")

    monkeypatch.setattr(tune_module, "EngineMeasure", Fails)
    monkeypatch.setattr(tune_module, "check_existing", lambda _plan: (server,))
    out = tmp_path / "bundle"
    assert tune_module.tune(TuneOptions(out=out)).verdict == "failed"
    until(lambda: len(lines(user)) == 2, "the second life")
    kinds = [event["kind"] for event in Bundle.open(out).events()]
    assert (*kinds[:2], kinds[-1]) == ("created", "existing_stopped", "existing_restarted")
    texts = "".join(path.read_text() for path in out.rglob("*") if path.is_file())
    assert "sesame" not in texts
    assert "its own" not in texts


DOCKER = textwrap.dedent(
    """
    import json, os, sys
    from pathlib import Path

    here = Path(__file__).parent
    with (here / "calls").open("a") as calls:
        calls.write(" ".join(sys.argv[1:]) + "\\n")
    containers = json.loads((here / "containers.json").read_text())
    if sys.argv[1] == "ps":
        print("\\n".join(c["Id"] for c in containers))
    if sys.argv[1] == "inspect":
        print(json.dumps([c for c in containers if c["Id"] in sys.argv[2:]]))
    """
)


def container(name, path, args, *, image="vllm/vllm-openai:v0.20.0", labels=None, **host):
    return {
        "Id": name * 12, "Name": f"/{name}", "Path": path, "Args": args,
        "Config": {"Image": image, "Labels": labels, "Env": ["HF_TOKEN=hf_secret"]},
        "HostConfig": {"AutoRemove": False, "NetworkMode": "bridge", **host},
    }  # fmt: skip


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A fake `docker` on PATH; called with the containers that run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "docker").write_text(f"#!{sys.executable}\n{DOCKER}")
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}")

    def runs(*containers):
        (folder / "containers.json").write_text(json.dumps(containers))
        return folder / "calls"

    return runs


def test_containers_with_a_server_are_found(docker):
    published = {"8000/tcp": [{"HostIp": "", "HostPort": "9001"}]}
    docker(
        container("a", "vllm", ["serve", "m"], PortBindings=published),
        container("b", "bash", ["-c", "python -m sglang.launch_server --port 31"], image="x/sg", NetworkMode="host"),
        container("c", "/opt/entry.sh", [], AutoRemove=True),
        container("d", "sleep", ["infinity"]),
        container("e", "postgres", [], image="postgres:16"),
    )
    found = running_containers()
    assert [(c.name, c.line.engine, c.port, c.auto_remove) for c in found] == [
        ("a", "vllm", 9001, False), ("b", "sglang", 31, False), ("c", "vllm", None, True),
    ]  # fmt: skip


def test_a_container_that_cannot_come_back_is_refused(docker):
    docker(container("gone", "vllm", ["serve", "m"], AutoRemove=True))
    server = next(s for s in find_existing() if s.container)
    with pytest.raises(EngineError, match=r"container gone.* was started with --rm") as caught:
        refuse_existing([server], stop=True)
    assert "docker stop gone" in caught.value.hint
    docker(container("pod", "vllm", ["serve", "m"], labels={"io.kubernetes.pod.name": "llm-0"}))
    server = next(s for s in find_existing() if s.container)
    with pytest.raises(EngineError, match=r"Kubernetes \(pod llm-0\)"):
        refuse_existing([server], stop=True)


def test_a_container_is_stopped_and_started(docker, tmp_path, monkeypatch):
    calls = docker(container("mine", "vllm", ["serve", "m", "--api-key", "sesame"]))
    server = next(s for s in find_existing() if s.container)
    monkeypatch.setattr("surespec.engines.handover.find_existing", tuple)
    said = []
    calls.unlink()
    with handed_over([server], tmp_path, said.append, lambda *_, **__: None):
        assert calls.read_text().split()[0] == "stop"
        assert "start" not in calls.read_text().split()
    assert calls.read_text().splitlines()[-1] == f"start {'mine' * 12}"
    assert "sesame" not in "".join(said)


def test_a_container_program_that_does_not_answer_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert running_containers() == []


def test_a_server_on_any_free_port_is_told_by_the_one_it_took(tmp_path):
    assert server_line(["vllm", "serve", "m", "--port", "0"]).port is None
    assert server_line(["vllm", "serve", "m"]).port == 8000
    model = toy.make_llama(tmp_path / "toy")
    argv = [sys.executable, "-m", "surespec", "serve", "--model", str(model), "--port", "0"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stderr if "http://" in line)
            found = existing_module._of_process(process.pid, {}, argv, server_line(argv))
            assert f":{found.port}" in line and found.port not in (0, 8000)
            assert "any free port" in found.obstacle
        finally:
            process.kill()
