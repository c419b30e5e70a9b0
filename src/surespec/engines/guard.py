"""A program of its own, for Linux: ``python -I -S guard.py PARENT_PID N CLEANUP*N COMMAND ...``. Standard library only.

It starts the command in its own process group and ends as the command ends. When surespec (the parent) is killed, the
kernel tells the guard, which kills the whole group: a server killed alone would leave its workers, with all their
memory, behind (vLLM's ``VLLM::EngineCore`` outlives its parent for ever). What no signal reaches, a container, the
cleanup command removes then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(parent: int, cleanup: list[str], command: list[str]) -> NoReturn:
    """Run the command until it ends; leaves with its exit code, or by the signal that ended it."""

    def parent_may_be_gone(_number: int, _frame: object) -> None:
        """SIGTERM: sent to the whole group by surespec (then the server ends by itself), or by the kernel."""
        if os.getppid() != parent:
            kill_strays(spared=clean_up(cleanup))
            os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, parent_may_be_gone)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # workers whose parent dies come here, and are reaped
    if os.getppid() != parent:
        sys.exit(1)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            sys.stderr.write(f"error: {command[0]}: {error.strerror}\n")
            os._exit(127)
    while True:
        pid, status = os.wait()
        if pid == child:
            break
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    for _ in range(200):
        if not kill_strays(everyone=killed):
            break
        time.sleep(0.01)  # once more: one may have been leaving the group just now
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def kill_strays(everyone: bool = False, spared: int = 0) -> bool:
    """SIGKILL to the descendants that left the group: when a server ends, nobody else knows of them any more. With
    ``everyone`` (the server was killed and could tell no worker to end) to all. Whether there were any."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (pathlib is slow to import)
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue
    own = {os.getpid()}
    while more := [pid for pid, parent in parents.items() if parent in own and pid not in own]:
        own.update(more)
    found = False
    for pid in own - {os.getpid(), spared}:
        try:
            if everyone or os.getpgid(pid) != os.getpgid(0):
                os.kill(pid, signal.SIGKILL)
                found = True
        except OSError:
            continue
        with contextlib.suppress(OSError):
            os.waitpid(pid, os.WNOHANG)
    return found


def clean_up(cleanup: list[str]) -> int:
    """Start the cleanup command in a session of its own, which outlives the group; its process when it has begun."""
    if not cleanup:
        return 0
    told, tell = os.pipe()  # closed by exec
    if child := os.fork():
        os.close(tell)
        os.read(told, 1)
        return child
    os.setsid()
    try:
        os.execvp(cleanup[0], cleanup)
    finally:
        os._exit(127)


if __name__ == "__main__":
    first = 3 + int(sys.argv[2])
    main(int(sys.argv[1]), sys.argv[3:first], sys.argv[first:])
