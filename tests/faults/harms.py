"""What is done to a run at its moment, and what is made good again before it is resumed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from rig import Ended, Moment, Rig, interrupt, make_rig

JUMPS_S = {"forwards": 3e8, "backwards": -3e8}
BEFORE_BUNDLE = ("loading", "planning", "creating")
"""Moments before there is a bundle that could be resumed."""


def kill_surespec(rig: Rig, moment: Moment) -> Ended:
    """SIGKILL: nothing of it can tidy up; what it started has to end by itself."""
    process = rig.start(moment)
    rig.reached(process)
    process.kill()
    return rig.end(process, killed=True)


def kill_server(rig: Rig, moment: Moment) -> Ended:
    """SIGKILL of the server, as for lack of memory."""
    process = rig.start(moment)
    rig.reached(process)
    os.kill(rig.server_pid(), signal.SIGKILL)
    rig.go()
    return rig.end(process)


def kill_server_with_stray(rig: Rig, moment: Moment) -> Ended:
    """The same, while its worker is in a session of its own and ignores SIGTERM."""
    process = rig.start(moment, stray=True)
    rig.reached(process)
    os.kill(rig.server_pid(), signal.SIGKILL)
    rig.go()
    return rig.end(process)


def kill_surespec_with_stray(rig: Rig, moment: Moment) -> Ended:
    """SIGKILL of surespec while the server's worker is in a session of its own."""
    process = rig.start(moment, stray=True)
    rig.reached(process)
    process.kill()
    return rig.end(process, killed=True)


def kill_worker(rig: Rig, moment: Moment) -> Ended:
    """SIGKILL of the server's child."""
    process = rig.start(moment)
    rig.reached(process)
    os.kill(rig.worker_pid(), signal.SIGKILL)
    rig.go()
    return rig.end(process)


def ctrl_c(rig: Rig, moment: Moment) -> Ended:
    """Once."""
    process = rig.start(moment)
    rig.reached(process)
    interrupt(process)
    rig.go()
    return rig.end(process)


def ctrl_c_twice(rig: Rig, moment: Moment) -> Ended:
    """Impatiently, and once more."""
    process = rig.start(moment)
    rig.reached(process)
    for pause in (0.05, 0.15, 0.3):
        interrupt(process)
        time.sleep(pause)
    rig.go()
    return rig.end(process)


def hang(rig: Rig, moment: Moment) -> Ended:
    """The server is stopped (SIGSTOP) for good; the user loses patience."""
    process = rig.start(moment)
    rig.reached(process)
    os.kill(rig.server_pid(), signal.SIGSTOP)
    rig.go()
    time.sleep(0.5)
    interrupt(process)
    return rig.end(process)


def read_only(rig: Rig, moment: Moment) -> Ended:
    """Nobody may write into the bundle any more."""
    process = rig.start(moment)
    rig.reached(process)
    target = rig.out if rig.out.exists() else rig.out.parent
    folders = [
        target,
        *(path for path in target.rglob("*") if path.is_dir() and rig.faults not in (path, *path.parents)),
    ]
    before = {path: path.stat().st_mode for path in folders}
    for path in folders:
        path.chmod(0o555)
    rig.go()
    try:
        process.wait(60)
    finally:
        for path, mode in before.items():
            path.chmod(mode)
    return rig.end(process, tidy=False)


def disk_full(rig: Rig, moment: Moment) -> Ended:
    """No byte is left on the bundle's file system; where none can be mounted, surespec's files may not grow."""
    process = rig.start(moment)
    rig.reached(process)
    ballast = rig.out.parent / "ballast"
    if os.path.ismount(rig.out.parent):
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
    else:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    rig.go()
    try:
        return rig.end(process)
    finally:
        ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Rig]:
    """A rig whose bundle lies on a file system of 4 MB, where that may be mounted."""
    folder.mkdir()
    place = folder / "disk"
    place.mkdir()
    mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True).returncode == 0
    )
    try:
        yield make_rig(folder / "rig", place / "run")
    finally:
        if mounted:
            subprocess.run(["umount", "-l", place], check=True)
