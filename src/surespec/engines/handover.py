"""Stop the servers that run already and always start them again, or leave the new arm in their place.

The starting again is done by ``restorer.py``, a process that outlives a killed surespec. It knows the servers before
the first of them is stopped. Environments are read here, go through a pipe, and are kept nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from surespec.engines import restorer
from surespec.engines.existing import Existing, find_existing
from surespec.engines.process import port_is_free
from surespec.engines.ready import stream_once
from surespec.engines.server_lines import flag_value, shortened
from surespec.errors import EngineError
from surespec.json_text import loads_json

MARKER = "SURESPEC_RUN"
STOP_GRACE_S = 30.0
WORKERS_GRACE_S = 5.0
KILL_GRACE_S = 10.0
PORT_FREE_S = 30.0
POLL_S = 0.1
READY_WITHIN_S = 1800.0
SETTLE_S = 1.0

Tell = Callable[[str], None]
Event = Callable[..., None]


class HandOver:
    """The life of servers that were stopped for a run. ``tell`` is given sentences for a person, ``event`` what goes
    into the bundle's time line (never an environment; commands with secrets removed)."""

    def __init__(self, servers: Sequence[Existing], folder: Path, tell: Tell, event: Event) -> None:
        self.servers = tuple(servers)
        self._folder = folder
        self._tell = tell
        self._event = event
        self._guard: subprocess.Popen[bytes] | None = None
        self._records: list[dict[str, Any]] = []

    def stop(self) -> None:
        """Stop every server cleanly and wait for its port. Raises EngineError when one cannot be stopped for good."""
        os.environ.pop(MARKER, None)
        self._records = [self._record(server) for server in self.servers]
        marker = f"{os.getpid()}-{time.time_ns()}"
        self._guard = _start_restorer()
        os.environ[MARKER] = marker  # every server of ours inherits it, and is known by it when surespec is killed
        self._say(
            do="hold", servers=self._records, marker=f"{MARKER}={marker}", events=str(self._folder / "events.jsonl")
        )
        for index, server in enumerate(self.servers):
            self._say(do="stopping", index=index)
            try:
                self._stop(server, self._records[index])
            except EngineError:
                self._say(do="kept", index=index)
                raise
        time.sleep(SETTLE_S)
        again = [found for found in find_existing() if _same(found, self.servers)]
        if again:
            raise EngineError(
                f"{again[0].label} appeared as soon as the running server was stopped, so something starts it again.",
                hint="Stop what starts it (a loop in a script, a supervisor) first.",
            )

    def restart(self) -> None:
        """Start them again as they were; says what became of it. Does nothing when nothing was stopped."""
        os.environ.pop(MARKER, None)
        answer = self._ask(do="restart")
        if answer is None:
            return
        self._event("existing_restarted", servers=[s.label for s in self.servers], **answer)
        pids = ", ".join(str(entry.get("pid") or entry.get("container")) for entry in answer["started"])
        for problem in answer["problems"]:
            self._tell(f"The server that ran before could not be started again: {problem}.")
        if pids and not answer["problems"]:
            names = " and ".join(s.name for s in self.servers)
            self._tell(f"{names}, which ran before, was started again as it was ({pids}) and is loading.")

    def apply(self, argv: Sequence[str]) -> bool:
        """Leave a new server in the place of the old one, once it has answered; else put the old one back (False)."""
        old, record = self.servers[0], self._records[0]
        answer = self._ask(end=False, **{**record, "do": "apply", "argv": list(argv)})
        started = (answer or {}).get("started") or []
        if not started or not self._answers(started[0]["pid"], old):
            problem = "; ".join((answer or {}).get("problems", ())) or "it did not answer a request"
            self._tell(f"The new server could not take the old one's place ({problem}), so the old one comes back.")
            self.restart()
            return False
        pid, guard = started[0]["pid"], self._guard.pid if self._guard else 0
        self._say(do="leave")
        os.environ.pop(MARKER, None)
        self._guard = None
        self._event("existing_replaced", servers=[old.label], pid=pid, command=shortened(argv))
        self._tell(
            f"The new server runs in the place of the old one (process {pid}, port {old.port}): {shortened(argv)}. "
            f"To go back to the old one, type: kill {pid} (process {guard} then starts it again as it was; "
            f"to stop both for good: kill {guard} {pid})."
        )
        return True

    def _record(self, server: Existing) -> dict[str, Any]:
        """What starting it again takes. Raises EngineError when it ended meanwhile or cannot be read."""
        if server.container is not None:
            program, identity = server.container.program, server.container.id
            stop = [program, "stop", "-t", str(int(STOP_GRACE_S)), identity]
            return {"stop": stop, "start": [program, "start", identity]}
        try:
            process = psutil.Process(server.pid)
            with process.oneshot():
                uids, gids = process.uids(), process.gids()
                return {
                    "pid": server.pid,
                    "started": _start_ticks(server.pid),
                    "argv": list(server.argv),
                    "cwd": process.cwd(),
                    "env": process.environ(),
                    "out": _output(server.pid, 1),
                    "err": _output(server.pid, 2),
                    "spare": str((self._folder / "existing-server.log").absolute()),
                    "uid": uids.real,
                    "gid": gids.real,
                    "groups": _groups(server.pid),
                    "umask": _umask(server.pid),
                    "port": server.port,
                }
        except (psutil.Error, OSError) as error:
            raise EngineError(f"{server.label} cannot be recorded: {error}.", hint="Stop it yourself first.") from error

    def _stop(self, server: Existing, record: Mapping[str, Any]) -> None:
        """SIGTERM, a wait, SIGKILL for what is left; ``docker stop`` for a container."""
        self._tell(f"Stopping {server.label}; it is started again at the end.")
        forced = False
        if server.container is None:
            forced = stop_tree(server.pid)
        else:
            done = subprocess.run(record["stop"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode:
                raise EngineError(f"{server.label} could not be stopped: {done.stderr.strip()[:300]}.")
        if forced:
            self._tell(f"{server.label} did not end within {STOP_GRACE_S:.0f} s of SIGTERM and was killed.")
        deadline = time.monotonic() + PORT_FREE_S
        while server.port and not port_is_free(server.port) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._event("existing_stopped", server=server.label, command=shortened(server.argv), killed=forced)

    def _answers(self, pid: int, old: Existing) -> bool:
        """Whether the new server answers a streamed request before it dies or its time is over."""
        deadline = time.monotonic() + READY_WITHIN_S
        while psutil.pid_exists(pid) and _not_dead(pid) and time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                if stream_once(_reachable(old.host), old.port or 0, key=flag_value(old.argv, ("--api-key",))) is None:
                    return True
            time.sleep(5 * POLL_S)
        return False

    def _ask(self, *, end: bool = True, **line: Any) -> dict[str, Any] | None:
        """Tell the restorer and wait for its answer; None without a restorer. ``end``: it ends with this."""
        guard = self._guard
        if guard is None or guard.stdout is None:
            return None
        self._say(**line)
        if end:
            self._guard = None
        try:
            answer = loads_json(guard.stdout.readline() or b"{}")
        except ValueError:
            answer = {}
        if end:
            guard.stdout.close()
            guard.wait()
        return {"started": [], "problems": ["the process that does it is gone"], **answer}

    def _say(self, **line: Any) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.write(json.dumps(line).encode() + b"\n")
                self._guard.stdin.flush()


@contextlib.contextmanager
def handed_over(servers: Sequence[Existing], folder: Path, tell: Tell, event: Event) -> Iterator[HandOver]:
    """The servers are stopped while the block runs and started again at its end, however it ends."""
    over = HandOver(servers, folder, tell, event)
    try:
        if servers:
            over.stop()
        yield over
    finally:
        over.restart()


def _start_restorer() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", restorer.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def stop_tree(pid: int) -> bool:
    """End a server and what it started; whether SIGKILL was needed."""
    try:
        top = psutil.Process(pid)
        below = top.children(recursive=True)
        top.terminate()
    except psutil.NoSuchProcess:
        return False
    except psutil.Error as error:
        raise EngineError(f"Process {pid} could not be stopped: {error}.", hint="Stop it yourself first.") from error
    _wait_for([top], STOP_GRACE_S)
    workers = _wait_for(below, SETTLE_S)
    for process in workers:  # some outlive the server, with all its memory
        with contextlib.suppress(psutil.Error):
            process.terminate()
    left = _wait_for([top, *workers], WORKERS_GRACE_S)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    if still := _wait_for(left, KILL_GRACE_S):
        raise EngineError(f"Process {still[0].pid} does not end, not even by SIGKILL.", hint="Look at it with ps.")
    return bool(left)


def _wait_for(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until they have ended; those that have not. One that nobody reaps has ended too."""
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if process.is_running() and _not_dead(process.pid)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    return left


def _same(found: Existing, servers: Sequence[Existing]) -> bool:
    """Whether a server found now is one of those that were stopped, come back."""
    return any(found.argv == s.argv or (s.port is not None and found.port == s.port) for s in servers)


def _output(pid: int, number: int) -> str | None:
    """The file that an output of a process goes to; None for a pipe, a socket or a deleted file."""
    with contextlib.suppress(OSError):
        target = Path(f"/proc/{pid}/fd/{number}").readlink()
        if target.is_absolute() and target.exists():
            return str(target)
    return None


def _start_ticks(pid: int) -> str:
    """When a process began, as ``/proc`` says it (clock ticks since boot); empty where there is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return ""


def _groups(pid: int) -> list[int]:
    return [int(number) for number in _status(pid, "Groups").split()]


def _umask(pid: int) -> int | None:
    text = _status(pid, "Umask")
    return int(text, 8) if text else None


def _status(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


def _not_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("", "0.0.0.0", "::", "localhost") else host
