"""A program of its own: ``python -I -S restorer.py``. Standard library only.

It starts a user's server again, whatever becomes of surespec. surespec tells it about the server through a pipe (one
JSON object a line), environment included, so nothing of it is on disk or in the process list. When the pipe ends
without a word, surespec was killed: then the server is started again too. It has a session of its own, so Ctrl-C does
not reach it. The lines, by ``do``:

    hold {servers, marker, events}        what to start again, and how surespec's own servers are known
    stopping {index}                      this one counts as stopped from now on
    kept {index}                          it could not be stopped, and runs on
    apply {argv, cwd, env, out}           start this one in the place of the first server
    leave                                 keep that one; the old servers come back when it ends
    restart                               start the old servers again, end

An answer is one line for ``apply`` and ``restart``: ``{"started": [{"pid": ...}], "problems": [...]}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any, BinaryIO

POLL_S = 0.1
GONE_WITHIN_S = 600.0
ARMS_GONE_WITHIN_S = 30.0
PORT_FREE_WITHIN_S = 30.0
ALIVE_AFTER_S = 1.0
STOP_WITHIN_S = 30.0
ASK_TIMEOUT_S = 120.0


def main(words: BinaryIO, answers: BinaryIO) -> None:
    """Do as the lines say; a line that ends the work, or the end of the pipe, ends this."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _unmoved)  # not SIG_IGN, which the servers started here would inherit
    held: dict[str, Any] = {"servers": []}
    stopped: set[int] = set()
    applied = None
    for raw in words:
        line = json.loads(raw)
        if line["do"] == "hold":
            held = line
        elif line["do"] == "stopping":
            stopped.add(line["index"])
        elif line["do"] == "kept":
            stopped.discard(line["index"])
        elif line["do"] == "apply":
            applied, answer = _started([line])
            _tell(answers, answer)
        elif line["do"] == "leave":
            answers.close()
            _watch(applied)
            break
        elif line["do"] == "restart":
            _end(applied)
            _tell(answers, _restart(held, stopped))
            return
    else:
        _end(applied)
    if stopped:
        _record(held, _restart(held, stopped))


def _unmoved(_number: int, _frame: object) -> None:
    """A signal that is not to end this process: the servers have to come back first."""


def _restart(held: dict[str, Any], stopped: set[int]) -> dict[str, Any]:
    """Start the stopped servers again, once they, and the servers that surespec started meanwhile, are gone."""
    _wait(lambda: not _marked(held.get("marker", "")), ARMS_GONE_WITHIN_S)
    for pid in _marked(held.get("marker", "")):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    gone = []
    problems = []
    for index, server in enumerate(held["servers"]):
        if index not in stopped:
            continue
        if "pid" in server and not _wait(lambda s=server: not _lives(s), GONE_WITHIN_S):
            problems.append(f"process {server['pid']} still runs, so it was not started again")
        else:
            gone.append(server)
    _, answer = _started(gone)
    return {**answer, "problems": [*problems, *answer["problems"]]}


def _started(servers: list[dict[str, Any]]) -> tuple[list[subprocess.Popen[bytes]], dict[str, Any]]:
    processes, pids, problems = [], [], []
    for server in servers:
        if "start" in server:
            _run(server["stop"])  # one that is being stopped would take a start for granted, and stop afterwards
            if problem := _run(server["start"]):
                problems.append(problem)
            else:
                pids.append({"container": server["start"][-1]})
            continue
        if server.get("port"):
            _wait(lambda s=server: _free(s["port"]), PORT_FREE_WITHIN_S)
        try:
            process = _spawn(server)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            problems.append(f"{server['argv'][0]}: {getattr(error, 'strerror', None) or error}")
            continue
        processes.append(process)
        pids.append({"pid": process.pid})
    deadline = time.monotonic() + ALIVE_AFTER_S
    while processes and time.monotonic() < deadline:
        time.sleep(POLL_S)
    ended = [process for process in processes if process.poll() is not None]
    problems += [f"process {process.pid} ended at once with exit code {process.returncode}" for process in ended]
    return processes, {"started": pids, "problems": problems}


def _spawn(server: dict[str, Any]) -> subprocess.Popen[bytes]:
    """A process as recorded: arguments, folder, environment, outputs, user; in a session of its own."""
    owner: dict[str, Any] = {}
    if server.get("uid") is not None and os.geteuid() == 0 and server["uid"] != 0:
        owner = {"user": server["uid"], "group": server["gid"], "extra_groups": server["groups"]}
    if server.get("umask") is not None:
        owner["umask"] = server["umask"]
    out = _open(server.get("out"), server.get("spare"))
    err = out if server.get("err") == server.get("out") else _open(server.get("err"), server.get("spare"))
    try:
        return subprocess.Popen(
            server["argv"],
            cwd=server["cwd"],
            env=server["env"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            **owner,
        )
    finally:
        for handle in {out, err} - {subprocess.DEVNULL}:
            os.close(handle)


def _open(path: str | None, spare: str | None) -> int:
    """The file an output went to, added to; else the spare one, for its owner alone; else nothing."""
    for name in (path, spare):
        if name == os.devnull:
            return subprocess.DEVNULL
        if name:
            with contextlib.suppress(OSError):
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY
                return os.open(name, flags, 0o600)
    return subprocess.DEVNULL


def _watch(applied: list[subprocess.Popen[bytes]] | None) -> None:
    """Until the server that was left running ends. Ending this watcher itself by SIGTERM leaves all as it is."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for process in applied or ():
        process.wait()
    _end(applied)


def _end(applied: list[subprocess.Popen[bytes]] | None) -> None:
    for process in applied or ():
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_WITHIN_S)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


def _run(argv: list[str]) -> str:
    """Run a command such as ``docker start``; why it failed, empty when it did not."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(argv)}: {error}"
    return f"{' '.join(argv)}: {done.stderr.strip()[:300]}" if done.returncode else ""


def _record(held: dict[str, Any], answer: dict[str, Any]) -> None:
    """Add to the bundle's time line what surespec could not add itself."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    event = {"t_utc": stamp, "kind": "existing_restarted", "by": "guard", **answer}
    if held.get("events"):
        with contextlib.suppress(OSError), open(held["events"], "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(json.dumps(event) + "\n")


def _tell(answers: BinaryIO, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _wait(condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _lives(server: dict[str, Any]) -> bool:
    """Whether the recorded process, and no later one of its number, still runs."""
    try:
        with open(f"/proc/{server['pid']}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        if sys.platform == "linux":
            return False
        try:
            os.kill(server["pid"], 0)
        except ProcessLookupError:
            return False
        return True
    return fields[0] not in "ZX" and fields[19] == server["started"]


def _marked(marker: str) -> list[int]:
    """Processes whose environment has the marker: what surespec started and its end has not ended yet."""
    found: list[int] = []
    if not marker or sys.platform != "linux":
        return found
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
            if marker.encode() in file.read().split(b"\0"):
                found.append(int(name))
    return found


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
