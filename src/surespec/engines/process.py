"""Start a server process, wait until it really answers, and leave nothing of it behind.

* Ready means that a streamed request gave tokens: servers exist that answer ``/v1/models`` and die at the first one.
* The server gets a session of its own, so Ctrl-C at the terminal reaches surespec alone, which then stops it.
* Stopping ends the whole process group and waits for every member: engines leave workers behind that hold the memory.
* Every start is stopped at exit; and on Linux a small guard (``guard.py``) leads the group, which kills all of it when
  surespec itself is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

from surespec.engines import guard
from surespec.engines.base import StageHook
from surespec.engines.failures import Failure, Moment, classify
from surespec.engines.log_tail import clean, last_meaningful, read_tail, redact_file
from surespec.engines.ready import listeners, speaks_http, stream_once
from surespec.errors import EngineError, PortInUseError

HOST = "127.0.0.1"
POLL_S = 0.1
STOP_GRACE_S = 10.0
KILL_GRACE_S = 5.0
CLEANUP_S = 60.0
MEMORY_BACK_S = 10.0
MEMORY_SLACK = 0.05

_running: set[ServerProcess] = set()


class ServerProcess:
    """A started server (see ``start_server``): its endpoint, its process group and its log.

    ``pid`` is that of the group's leader: the guard on Linux, the server itself elsewhere.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        port: int,
        log_path: Path,
        engine: str = "",
        cleanup: Sequence[str] = (),
    ) -> None:
        self.endpoint = f"http://{HOST}:{port}"
        self.pid = process.pid
        self.start_duration_s = 0.0
        self.metrics_endpoints: tuple[str, ...] = ()
        self._process = process
        self._port = port
        self._engine = engine
        self._cleanup = list(cleanup)
        self._memory_before = psutil.virtual_memory().available
        self.log_path = log_path
        _running.add(self)

    def alive(self) -> bool:
        """Whether the server process still runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """SIGTERM to the whole group, SIGKILL to what is left, until all are gone and the port is free.

        Then the log is cleaned of secrets. Ctrl-C meanwhile is held until the server is gone, and shortens the wait for
        SIGKILL. Raises EngineError when a process survives even that.
        """
        with _interrupts_held() as interrupts:
            self._stop(interrupts)

    def _stop(self, interrupts: Sequence[int]) -> None:
        strays = [process for process in _descendants(self.pid) if _group_of(process.pid) != self.pid]
        self._signal(signal.SIGTERM, strays)
        self._signal(signal.SIGCONT, strays)  # a process that was stopped would not even see the first
        if not self._gone_within(STOP_GRACE_S, strays, interrupts):
            self._signal(signal.SIGKILL, strays)
            if not self._gone_within(KILL_GRACE_S, strays):
                _running.discard(self)
                raise EngineError(
                    f"The server (process {self.pid}) does not end, not even by SIGKILL.",
                    hint=f"Look at it with: ps -g {self.pid}",
                )
        _running.discard(self)
        if self._cleanup:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(self._cleanup, stdin=subprocess.DEVNULL, capture_output=True, timeout=CLEANUP_S)
        deadline = time.monotonic() + KILL_GRACE_S
        while not port_is_free(self._port) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._wait_for_memory()
        redact_file(self.log_path)

    def has_port(self) -> bool:
        """Whether what listens on its port is part of it: another program may have taken the port since it was chosen,
        and be measured instead. True where that cannot be told (another user's process, a container's)."""
        holders = listeners(self._port)
        own = {process.pid for process in _descendants(self.pid)}
        known = bool(holders) and not self._cleanup and sys.platform == "linux"
        return not known or any(pid in own or _group_of(pid) == self.pid for pid in holders)

    def _wait_for_memory(self) -> None:
        """Until the machine has about the memory it had before, for a while. On a Jetson it is the GPU's too, and a
        next server that starts too early finds too little."""
        deadline = time.monotonic() + MEMORY_BACK_S
        wanted = self._memory_before - MEMORY_SLACK * psutil.virtual_memory().total
        while psutil.virtual_memory().available < wanted and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def last_words(self) -> str:
        """The last meaningful line of the log, and the signal that ended the server, if one did."""
        words, code = last_words(self.log_path).rstrip("."), self.exit_code
        if code is None or code >= 0:
            return words
        why = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
        return f"{words} (killed by {signal.Signals(-code).name}{why})".lstrip()

    def failure(self, moment: Moment) -> Failure:
        """What the log and the ending say, by the table of failures."""
        code = self.exit_code
        signalled = -code if code is not None and code < 0 else None
        return classify(self._engine, moment, code, signalled, read_tail(self.log_path))

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def _signal(self, number: int, strays: Sequence[psutil.Process]) -> None:
        """Signal the group, which outlives its leader while a child of it lives, and children that left the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        for process in strays:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def _gone_within(self, seconds: float, strays: Sequence[psutil.Process], hurry: Sequence[int] = ()) -> bool:
        """Wait for the leader (to reap it) and then for the rest of its group; not when there is ``hurry``."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None or group_members(self.pid) or any(_lives(process) for process in strays):
            if time.monotonic() >= deadline or hurry:
                return False
            time.sleep(POLL_S / 5 if self._process.poll() is None else POLL_S)
        return True


def start_server(
    argv: Sequence[str],
    *,
    port: int,
    log_path: Path,
    timeout_s: float,
    engine: str = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    cleanup: Sequence[str] = (),
    on_stage: StageHook | None = None,
    stage_of: Callable[[str], str | None] | None = None,
    ready: Callable[[ServerProcess], bool] | None = None,
) -> ServerProcess:
    """Run ``argv`` as a server on ``port`` and wait until a streamed chat request gives a token.

    ``engine`` is its name in ``rules/failures.toml``. Its output goes to ``log_path``; ``env`` is added to the
    environment; ``cleanup`` is a command that removes what no signal reaches (a container), run when the server has
    been stopped; ``stage_of`` reads from a line of the log what the engine is doing now; ``ready`` is asked again and
    again before the first request, where listening does not mean that a model is there. Whatever goes wrong, Ctrl-C
    included, the process is ended first. Raises PortInUseError, or EngineError with the reason found in the log.
    """
    stage = on_stage or (lambda _text: None)
    if not port_is_free(port):
        raise PortInUseError(
            f"Port {port} is in use by another process.",
            hint="Stop it, or choose another port.",
            failure=classify(engine, "start", None, None, [f"OSError: [Errno 98] Address already in use: port {port}"]),
        )
    stage("starting")
    begun = time.monotonic()
    server = ServerProcess(_spawn(argv, log_path, env, cwd, cleanup), port, log_path, engine, cleanup)
    try:
        with log_path.open("rb") as log:
            _wait_until_listening(server, port, begun + timeout_s, stage, _LogStages(log, stage_of, stage))
            while ready is not None and not ready(server):
                _check_alive(server, begun + timeout_s, "start")
                time.sleep(POLL_S)
        stage("answering a first request")
        first_request(server, port, begun + timeout_s)
    except BaseException:
        server.stop()
        raise
    server.start_duration_s = time.monotonic() - begun
    return server


def launch_process(
    argv: Sequence[str], *, port: int, log_path: Path, engine: str = "", env: Mapping[str, str] | None = None
) -> ServerProcess:
    """Run one part of a server that has several (see ``start_server``), without waiting for it. The caller stops it; at
    exit it is stopped anyway. Raises EngineError when it cannot be started at all."""
    return ServerProcess(_spawn(argv, log_path, env, None, ()), port, log_path, engine)


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
    return last_meaningful(read_tail(log_path))


def group_members(group: int) -> list[int]:
    """The living processes of a process group. One that has ended and waits to be reaped by others is not alive."""
    return [process.pid for process in psutil.process_iter() if _group_of(process.pid) == group and _lives(process)]


def _group_of(pid: int) -> int:
    """The process group of a process; 0 when it is gone or not ours to ask about."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _spawn(
    argv: Sequence[str], log_path: Path, env: Mapping[str, str] | None, cwd: Path | None, cleanup: Sequence[str]
) -> subprocess.Popen[bytes]:
    """The process, in a session of its own, tied to this one's life where the system can."""
    watch = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(len(cleanup)), *cleanup]
    guarded = [*watch, *argv]
    try:
        with log_path.open("ab") as log:
            return subprocess.Popen(
                guarded if sys.platform == "linux" else list(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                cwd=cwd,
                start_new_session=True,
            )
    except OSError as error:
        raise EngineError(
            f"{argv[0]} cannot be started: {error.strerror or error}.", hint="Is it installed?"
        ) from error


@contextlib.contextmanager
def _interrupts_held() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM that come meanwhile go into the list, and are raised at the end: once a server is being
    stopped, that has to come to its end."""
    held: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    before = {number: signal.signal(number, lambda n, _: held.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield held
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if held and before[signal.SIGINT] is not signal.SIG_IGN:
        raise KeyboardInterrupt


class _LogStages:
    """Reads what a server adds to its log and tells the stage it names."""

    def __init__(self, log: BinaryIO, stage_of: Callable[[str], str | None] | None, tell: StageHook) -> None:
        self._log, self._stage_of, self._tell = log, stage_of, tell
        self._rest = b""
        self._said = ""

    def read(self) -> None:
        """Tell the last stage of the lines that came since the last call, once."""
        if self._stage_of is None:
            return
        *lines, self._rest = (self._rest + self._log.read()).split(b"\n")
        for line in lines:
            stage = self._stage_of(clean(line.decode("utf-8", "replace")))
            if stage and stage != self._said:
                self._said = stage
                self._tell(stage)


def _wait_until_listening(
    server: ServerProcess, port: int, deadline: float, stage: StageHook, stages: _LogStages
) -> None:
    """Until something speaks HTTP on the port: docker accepts connections for a container that does not listen yet."""
    stage("loading")
    while True:
        stages.read()
        _check_alive(server, deadline, "start")
        with contextlib.suppress(OSError, http.client.HTTPException):
            speaks_http(HOST, port)
            if server.has_port():
                return
        time.sleep(POLL_S)


def first_request(server: ServerProcess, port: int, deadline: float) -> None:
    """Until a streamed request gave a token. A server still loading may answer 503 or break the connection.

    Raises EngineError when it ends, its time is over (``deadline``, monotonic seconds), or it answers with an error.
    """
    while True:
        _check_alive(server, deadline, "first_request")
        try:
            refusal = stream_once(HOST, port)
        except (OSError, http.client.HTTPException) as error:
            refusal = str(error) or type(error).__name__
            retry = True
        else:
            if refusal is None:
                return
            retry = refusal.startswith("HTTP 503")
        if not retry:
            message = f"The server started, but its first request failed: {refusal}."
            raise EngineError(message, hint=_hint(server), failure=server.failure("first_request"))
        time.sleep(POLL_S)


def _check_alive(server: ServerProcess, deadline: float, moment: Moment) -> None:
    """Raise EngineError when the server has ended or its time is over."""
    if not server.alive():
        words = server.last_words()
        said = f": {words.removeprefix('surespec: ').removeprefix('error: ')}" if words else ""
        message = f"The server ended while starting (exit code {server.exit_code}){said}."
    elif time.monotonic() >= deadline:
        words = server.last_words()
        message = f"The server did not answer in time{f'; its log ends with: {words}' if words else ''}."
    else:
        return
    raise EngineError(message, hint=_hint(server), failure=server.failure(moment))


def _hint(server: ServerProcess) -> str:
    return f"Its log: {server.log_path}"


def _stop_all() -> None:
    """At exit: end what is still running."""
    for server in list(_running):
        with contextlib.suppress(EngineError):
            server.stop()


atexit.register(_stop_all)
