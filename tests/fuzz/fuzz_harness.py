"""One case of fuzzing: a parser gets an input and must answer with a result or with an error made for people.

A ``Surface`` is a place where text or bytes from outside come in: how to make cases, and the call that a command makes
with them. ``run_case`` says ``read`` or ``refused``, and raises ``Finding`` for everything else: another exception, an
error without words or with too many, control characters in it, more than ``LIMIT_S`` seconds of processor time.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from surespec.errors import SurespecError, UsageError

LIMIT_S = 5.0
MESSAGE_CHARS = 600
SRC = Path(__file__).parents[2] / "src"
Case = Any
"""Made of bytes, texts, whole numbers, tuples, lists and dicts only, so that its ``repr`` brings it back."""


class Finding(AssertionError):
    """A case that broke the promise. ``where`` is the same for all cases that break it at one place."""

    def __init__(self, where: str, detail: str) -> None:
        super().__init__(f"{where}: {detail}")
        self.where = where
        self.detail = detail


class TooSlow(BaseException):
    """Raised inside the case by the watchdog; no ``except Exception`` of the product can swallow it."""


@dataclass(frozen=True)
class Surface:
    """``check`` gets a case and an empty folder, and may raise SurespecError or one of ``also``.

    ``share`` is its part of a long run: less where a case is slow. ``quick`` is its number of cases in ``make test``.
    """

    name: str
    cases: st.SearchStrategy[Case]
    check: Callable[[Case, Path], None]
    also: tuple[type[Exception], ...] = ()
    share: float = 1.0
    quick: int = 40


def run_case(surface: Surface, case: Case, folder: Path) -> str:
    """``read`` or ``refused``. Raises Finding. ``folder`` is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with _watchdog():
            surface.check(case, folder)
    except (SurespecError, *surface.also) as error:
        _check_words(error)
        return "refused"
    except Finding:
        raise
    except TooSlow as error:
        raise Finding(f"slow at {_place(error)}", f"more than {LIMIT_S:g} s of processor time") from None
    except MemoryError as error:
        raise Finding(f"memory at {_place(error)}", "more memory than allowed") from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        if type(error).__module__.startswith("hypothesis"):
            raise
        raise Finding(f"{type(error).__name__} at {_place(error)}", str(error)[:300]) from error
    return "read"


def expect(condition: object, where: str, detail: str = "") -> None:
    """A property of a result, beside having come back at all."""
    if not condition:
        raise Finding(where, detail)


@contextlib.contextmanager
def _watchdog() -> Iterator[None]:
    """Interrupt what computes for too long. Processor time, so that a busy machine is no finding."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _bark)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _bark(_signum: int, _frame: object) -> None:
    raise TooSlow


def _check_words(error: Exception) -> None:
    message, hint = str(getattr(error, "message", error)), str(getattr(error, "hint", ""))
    kind = f"{type(error).__name__} raised at {_place(error)}"
    expect(message.strip(), f"no message: {kind}")
    expect(len(message) <= MESSAGE_CHARS, f"{len(message)} characters: {kind}", message[:200])
    expect(len(hint) <= 2 * MESSAGE_CHARS, f"a hint of {len(hint)} characters: {kind}", hint[:200])
    for text in (message, hint):
        raw = [c for c in text if not c.isprintable()]
        expect(not raw, f"control characters: {kind}", f"{raw[:5]!r} in {text[:200]!r}")
    if isinstance(error, SurespecError):
        wanted = 2 if isinstance(error, UsageError) else 1
        expect(error.exit_code == wanted, f"exit code {error.exit_code}: {kind}")


def _place(error: BaseException) -> str:
    """The innermost line of surespec that the exception went through, else the innermost at all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(str(SRC))]
    frame = (own or frames)[-1] if frames else None
    return f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})" if frame else "?"


__all__ = ["Case", "Finding", "Surface", "expect", "run_case"]
