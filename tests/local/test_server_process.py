"""``serve`` as a process: the port first, a true ready line, and a clean end by signal."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving import wait_for
from surespec.errors import PortInUseError, SurespecError, UsageError
from surespec.local import server as server_module
from surespec.local.server import ServeOptions, bind, serve
from toy import make_llama

CODE = "import json, sys; from surespec.local.server import *; serve(ServeOptions(**json.loads(sys.argv[1])))"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("toy"))


@contextlib.contextmanager
def server(model: Path, **options: object) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A serving process, its port, and what it said until it was ready."""
    given = {"model": str(model), "served_model_name": "toy", "port": 0} | options
    process = subprocess.Popen([sys.executable, "-c", CODE, json.dumps(given)], stderr=subprocess.PIPE, text=True)
    said = ""
    try:
        assert process.stderr is not None
        for line in process.stderr:
            said += line
            if ready := re.match(r"surespec: serving toy on http://127\.0\.0\.1:(\d+) \(speculation: (.*)\)$", line):
                yield process, int(ready[1]), said
                break
        else:
            raise AssertionError(f"it never became ready: {said}")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    with contextlib.closing(connection):
        return answer.status, answer.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_serves_and_stops_by_signal(model: Path, number: int) -> None:
    with server(model, speculative_config={"method": "ngram", "num_speculative_tokens": 2}) as (process, port, said):
        assert "loading" in said and "ngram, k = 2" in said and "warning" not in said
        assert get(port, "/health")[0] == 200
        assert b"vllm:generation_tokens_total" in get(port, "/metrics")[1]
        process.send_signal(number)
        rest = process.communicate(timeout=20)[1]
        assert process.returncode == 0 and "Traceback" not in rest


def open_long_stream(port: int) -> socket.socket:
    """A raw connection with a stream of 64 x 500 tokens that has begun."""
    body = json.dumps({"prompt": ["a"] * 64, "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
    client = socket.create_connection(("127.0.0.1", port), timeout=20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    client.sendall(head.encode() + b"\r\n\r\n" + body)
    assert client.recv(1000).startswith(b"HTTP/1.1 200")
    return client


def test_hang_ups_are_noticed_and_a_second_signal_ends_open_streams_with_an_error(model: Path) -> None:
    with server(model) as (process, port, _):
        open_long_stream(port).close()
        aborted = re.compile(rb'vllm:request_success_total{.*"abort".*} (\d+)')

        def aborts() -> int:
            found = aborted.search(get(port, "/metrics")[1])
            assert found is not None
            return int(found[1])

        wait_for(lambda: aborts() > 0, "the client's hang-up")
        client, received = open_long_stream(port), b""
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # another one, because two equal signals may arrive as one
        while piece := client.recv(65536):
            received = received[-65536:] + piece
        client.close()
        assert process.wait(timeout=20) == 0
        assert b"The server was stopped before the request was finished" in received


def test_the_key_comes_from_the_environment_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SURESPEC_API_KEY", "s3cret")
    with server(model) as (_, port, said):
        assert get(port, "/v1/models")[0] == 401
        assert "s3cret" not in said


def test_a_taken_port_is_named_before_anything_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"Port {port} on 127.0.0.1 is already in use") as error:
            serve(ServeOptions(model="no-such-model", port=port))
        assert "--port" in error.value.hint


def test_a_port_that_another_loading_server_has_bound_is_taken_too() -> None:
    with bind("127.0.0.1", 0) as other, pytest.raises(PortInUseError):
        bind("127.0.0.1", other.getsockname()[1])


def test_a_port_with_lingering_connections_is_free() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = listener.accept()
        served.close()  # the server's end closes first and lingers in TIME_WAIT
        client.close()
    with bind("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 8000), ("127.0.0.1", 70000), ("203.0.113.7", 0)])
def test_an_address_that_cannot_be_used_is_named(host: str, port: int) -> None:
    with pytest.raises(UsageError, match=re.escape(str(port) if port > 65535 else host)):
        bind(host, port)


@pytest.mark.parametrize(
    ("host", "key", "warning"), [("0.0.0.0", None, "without any key"), ("::", "k", "with the API key")]
)
def test_a_server_that_others_can_reach_says_so(
    host: str, key: str | None, warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    listener: Any = SimpleNamespace(getsockname=lambda: (host, 8000))
    engine: Any = SimpleNamespace(speculative=None)
    server_module._announce(ServeOptions(model="m", host=host), listener, "m", engine, key)
    said = capsys.readouterr().err
    assert "other machines" in said and warning in said
    assert f"serving m on http://{'[::]' if host == '::' else host}:8000 (speculation: off)" in said


def test_a_model_that_does_not_load_frees_the_port(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(SurespecError, match="nothing-here"):
        serve(ServeOptions(model=str(tmp_path / "nothing-here"), port=port))
    bind("127.0.0.1", port).close()


def test_the_key_is_not_shown() -> None:
    assert "s3cret" not in repr(ServeOptions(model="m", api_key="s3cret"))
