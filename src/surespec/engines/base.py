"""What ``tune`` needs of an engine: a command for people, a server that runs, and its end.

Engines know how to start and stop and what their dialect is; they know nothing about policy.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from surespec.core import Arm

StageHook = Callable[[str], None]
"""Called with what a start is doing now, in words: ``starting``, ``loading``, ``answering a first request``."""

DEFAULT_PORT = 8000


class RunningServer(Protocol):
    """One server life. ``endpoint`` is its root URL; ``start_duration_s`` is the time to its first real answer."""

    endpoint: str
    pid: int
    start_duration_s: float

    def alive(self) -> bool:
        """Whether the server process still runs."""
        ...

    def stop(self) -> None:
        """End it and everything it started; returns when they are gone and the port is free. Never raises twice."""
        ...

    def last_words(self) -> str:
        """The last meaningful line of its log, to explain a failure."""
        ...


class Engine(Protocol):
    """One engine with one target model."""

    @property
    def name(self) -> str:
        """The name ``--engine`` takes."""
        ...

    @property
    def k_by_batch_size(self) -> bool:
        """Whether it reads ``num_speculative_tokens_per_batch_size``: k by the number of running requests."""
        ...

    def command(self, arm: Arm, port: int = DEFAULT_PORT) -> list[str]:
        """The command a person would type to serve this arm, as arguments (see ``shell_text``)."""
        ...

    def start(self, arm: Arm, log_path: Path, on_stage: StageHook | None = None) -> RunningServer:
        """Start the arm on a free port of the loopback interface; returns after a real streamed answer.

        Raises EngineError with the reason found in the log.
        """
        ...


def shell_text(argv: Sequence[str]) -> str:
    """Arguments as one line that a shell reads back unchanged."""
    return shlex.join(argv)
