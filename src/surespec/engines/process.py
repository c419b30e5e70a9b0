"""Start a server process, wait until it really answers, and leave nothing of it behind.

* Ready means that a streamed request gave tokens: servers exist that answer ``/v1/models`` and die at the first one.
* The server gets a session of its own, so Ctrl-C at the terminal reaches surespec alone, which then stops it.
* Every start is stopped at exit; and on Linux the kernel kills the server when surespec itself is killed
  (PR_SET_PDEATHSIG, set by a small wrapper that then becomes the server). That signal comes when the *thread* that
  started the server ends, so start it from one that outlives it, such as the main thread.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from surespec.engines.base import StageHook
from surespec.errors import EngineError, PortInUseError

HOST = "127.0.0.1"
POLL_S = 0.1
STOP_GRACE_S = 10.0
KILL_GRACE_S = 5.0
REQUEST_TIMEOUT_S = 120.0
_TAIL_BYTES = 20_000

# Runs in the child, before it becomes the server: die with the parent, then exec. 1 is PR_SET_PDEATHSIG, 9 is SIGKILL.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"error: {sys.argv[2]}: {error.strerror}")
"""

_running: set[ServerProcess] = set()


class ServerProcess:
    """A started server (see ``start_server``): its endpoint, its process group and its log."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
        self.endpoint = f"http://{HOST}:{port}"
        self.pid = process.pid
        self.start_duration_s = 0.0
        self._process = process
        self._port = port
        self.log_path = log_path
        _running.add(self)

    def alive(self) -> bool:
        """Whether the server process still runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """SIGTERM to the whole group, SIGKILL to what is left, until all are gone and the port is free.

        Raises EngineError when a process of the group survives even that.
        """
        self._signal(signal.SIGTERM)
        if not self._gone_within(STOP_GRACE_S):
            self._signal(signal.SIGKILL)
            if not self._gone_within(KILL_GRACE_S):
                _running.discard(self)
                raise EngineError(
                    f"The server (process {self.pid}) does not end, not even by SIGKILL.",
                    hint=f"Look at it with: ps -g {self.pid}",
                )
        _running.discard(self)
        deadline = time.monotonic() + KILL_GRACE_S
        while not port_is_free(self._port) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def last_words(self) -> str:
        """The last meaningful line of the log, and the signal that ended the server, if one did."""
        words, code = last_words(self.log_path).rstrip("."), self.exit_code
        if code is None or code >= 0:
            return words
        why = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
        return f"{words} (killed by {signal.Signals(-code).name}{why})".lstrip()

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def _signal(self, number: int) -> None:
        """Signal the group, which outlives its leader while a child of it lives."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _gone_within(self, seconds: float) -> bool:
        """Wait for the leader (to reap it) and then for the rest of its group."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)
        while _group_lives(self.pid):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return self._process.poll() is not None


def start_server(
    argv: Sequence[str],
    *,
    port: int,
    log_path: Path,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    on_stage: StageHook | None = None,
) -> ServerProcess:
    """Run ``argv`` as a server on ``port`` and wait until a streamed chat request gives a token.

    Its output goes to ``log_path``; ``env`` is added to the environment. Whatever goes wrong, Ctrl-C included, the
    process is ended first. Raises PortInUseError, or EngineError with the reason found in the log.
    """
    stage = on_stage or (lambda _text: None)
    if not port_is_free(port):
        raise PortInUseError(f"Port {port} is in use by another process.", hint="Stop it, or choose another port.")
    stage("starting")
    begun = time.monotonic()
    server = ServerProcess(_spawn(argv, log_path, env), port, log_path)
    try:
        _wait_until_listening(server, port, begun + timeout_s, stage)
        stage("answering a first request")
        _first_request(server, port, begun + timeout_s)
    except BaseException:
        server.stop()
        raise
    server.start_duration_s = time.monotonic() - begun
    return server


def free_port() -> int:
    """A port that nobody uses now on the loopback interface."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not count
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def last_words(log_path: Path) -> str:
    """The last line of a log that names an error, else its last line that is not empty; at most 300 characters."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not re.fullmatch(r"[\^~\s]+", line)]
    named = [line for line in lines if re.search(r"\b(error|refused|failed|\w+Error)\b", line, re.IGNORECASE)]
    return (named or lines or [""])[-1][:300]


def _spawn(argv: Sequence[str], log_path: Path, env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    """The process, in a session of its own, tied to this one's life where the system can."""
    wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
    command = [*wrapper, *argv] if sys.platform == "linux" else list(argv)
    try:
        with log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                start_new_session=True,
            )
    except OSError as error:
        raise EngineError(
            f"{argv[0]} cannot be started: {error.strerror or error}.", hint="Is it installed?"
        ) from error


def _wait_until_listening(server: ServerProcess, port: int, deadline: float, stage: StageHook) -> None:
    """Until something accepts connections on the port."""
    stage("loading")
    while True:
        _check_alive(server, deadline)
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1.0):
            return
        time.sleep(POLL_S)


def _first_request(server: ServerProcess, port: int, deadline: float) -> None:
    """Until a streamed request gave a token. A server still loading may answer 503 or break the connection."""
    while True:
        _check_alive(server, deadline)
        try:
            refusal = _stream_once(port)
        except (OSError, http.client.HTTPException) as error:
            refusal = str(error) or type(error).__name__
            retry = True
        else:
            if refusal is None:
                return
            retry = refusal.startswith("HTTP 503")
        if not retry:
            raise EngineError(f"The server started, but its first request failed: {refusal}.", hint=_hint(server))
        time.sleep(POLL_S)


def _stream_once(port: int) -> str | None:
    """Send one short streamed chat; None when it gave a choice and no error, else the reason."""
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("SURESPEC_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.request("GET", "/v1/models", headers=headers)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            return f"HTTP {response.status} from /v1/models"
        model = str(json.loads(body)["data"][0]["id"])
        messages = [{"role": "user", "content": "Say hello."}]
        request = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
        connection.request("POST", "/v1/chat/completions", body=json.dumps(request), headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            return f"HTTP {response.status}: {_reason(response.read(2000).decode('utf-8', 'replace'))}"
        return _read_stream(response)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return f"its answer is not that of an OpenAI-compatible server ({type(error).__name__})"
    finally:
        connection.close()


def _read_stream(response: http.client.HTTPResponse) -> str | None:
    """Read server-sent events to the end; None when at least one held a choice and none an error."""
    chosen = False
    for data in _events(response):
        if data == "[DONE]":
            break
        chunk = json.loads(data)
        if chunk.get("error"):
            return _reason(data)
        chosen = chosen or bool(chunk.get("choices"))
    return None if chosen else "the stream ended without a token"


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        text = line.decode("utf-8", "replace").strip()
        if text.startswith("data:"):
            yield text.removeprefix("data:").strip()


def _reason(text: str) -> str:
    """The message inside an error body, or the body."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:300]


def _check_alive(server: ServerProcess, deadline: float) -> None:
    """Raise EngineError when the server has ended or its time is over."""
    if not server.alive():
        words = server.last_words()
        said = f": {words.removeprefix('surespec: ').removeprefix('error: ')}" if words else ""
        raise EngineError(f"The server ended while starting (exit code {server.exit_code}){said}.", hint=_hint(server))
    if time.monotonic() >= deadline:
        words = server.last_words()
        said = f"; its log ends with: {words}" if words else ""
        raise EngineError(f"The server did not answer in time{said}.", hint=_hint(server))


def _hint(server: ServerProcess) -> str:
    return f"Its log: {server.log_path}"


def _group_lives(group: int) -> bool:
    """Whether any process of the group exists (zombies that wait for their parent included)."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _stop_all() -> None:
    """At exit: end what is still running."""
    for server in list(_running):
        with contextlib.suppress(EngineError):
            server.stop()


atexit.register(_stop_all)
