"""Python loads this by itself in every process of a run under test (PYTHONPATH); nothing of surespec is replaced.

* ``surespec serve`` becomes the stand-in server, so that a launch takes a tenth of a second and its speed is fixed.
* ``surespec tune`` stops at one moment, named in ``hook.json``: it writes ``reached`` and waits for ``go``. An audit hook
  finds the moment: the n-th opening, renaming or importing of something whose name fits a pattern.
* With ``clock`` in the folder, the wall clock of ``surespec tune`` is off by the seconds that stand in it.
"""

import json
import os
import sys
import time

FOLDER = os.environ.get("SURESPEC_FAULTS", "")
LONGEST_WAIT_S = 60.0


def meet(folder: str) -> None:
    """Say that the moment has come, and wait until the test has done what it wants to do in it."""
    with open(os.path.join(folder, "reached"), "w") as file:  # noqa: PTH118, PTH123
        file.write(str(os.getpid()))
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not os.path.exists(os.path.join(folder, "go")) and time.monotonic() < deadline:  # noqa: PTH110, PTH118
        time.sleep(0.01)


def watch(folder: str) -> None:
    """Install the hook that ``hook.json`` asks for."""
    import fnmatch

    try:
        with open(os.path.join(folder, "hook.json")) as file:  # noqa: PTH118, PTH123
            wanted = json.load(file)
    except FileNotFoundError:
        return
    left = int(wanted["number"])
    event_name = {"open": "open", "rename": "os.rename", "import": "import"}[wanted["event"]]

    def hook(event: str, arguments: tuple) -> None:
        nonlocal left
        if event != event_name or left == 0:
            return
        name = arguments[1 if event == "os.rename" else 0]
        if isinstance(name, bytes):
            name = name.decode("utf-8", "replace")
        if isinstance(name, (str, os.PathLike)) and fnmatch.fnmatch(os.fspath(name), wanted["pattern"]):
            left -= 1
            if left == 0:
                meet(folder)

    sys.addaudithook(hook)


def shift_clock(folder: str) -> None:
    """A wall clock that jumps by the seconds in ``clock`` as soon as that file is there."""
    import datetime

    real, true = time.time, datetime.datetime

    def offset() -> float:
        try:
            with open(os.path.join(folder, "clock")) as file:  # noqa: PTH118, PTH123
                return float(file.read())
        except (OSError, ValueError):
            return 0.0

    class Jumping(true):
        @classmethod
        def now(cls, tz=None):
            return true.now(tz) + datetime.timedelta(seconds=offset())

    time.time = lambda: real() + offset()
    datetime.datetime = Jumping


if FOLDER and "surespec" in sys.orig_argv[1:4]:
    words = sys.orig_argv[sys.orig_argv.index("surespec") + 1 :]
    if words[:1] == ["serve"]:
        server = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "fault_server.py")  # noqa: PTH100, PTH118, PTH120
        os.execv(sys.executable, [sys.executable, "-I", "-S", server, FOLDER, *words[1:]])
    if words[:1] == ["tune"]:
        shift_clock(FOLDER)
        watch(FOLDER)
