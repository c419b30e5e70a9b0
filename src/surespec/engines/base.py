"""What ``tune`` needs of an engine: a command for people, a server that runs, and its end.

Engines know how to start and stop and what their dialect is; they know nothing about policy.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from surespec.core import Arm
from surespec.engines.failures import Failure, Moment, Remedy
from surespec.engines.pace import Pace

StageHook = Callable[[str], None]
"""Called with what a start is doing now, in words: ``starting``, ``loading``, ``answering a first request``."""

FetchHook = Callable[[str, int, int], None]
"""Called with what is being fetched, bytes so far, and bytes in all (0 while unknown)."""

DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the user said about the engine beside its model. None: the engine chooses or finds it.

    ``python`` is the interpreter of an engine that is a Python package, ``program`` the file of one that is not.
    ``max_model_len`` is in tokens; ``max_num_seqs`` is how many requests will run at once at most;
    ``gpu_memory_utilization`` is a share of the device's memory. The last four are Dynamo's.
    """

    python: Path | None = None
    program: Path | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 8
    gpu_memory_utilization: float | None = None
    workers: int = 1
    router_mode: str = "round-robin"
    discovery: str = "file"
    roll: bool = False


class RunningServer(Protocol):
    """One server life. ``endpoint`` is its root URL; ``start_duration_s`` is the time to its first real answer.

    ``metrics_endpoints`` are the servers whose metrics are summed, where that is not ``endpoint`` itself (empty).
    """

    endpoint: str
    pid: int
    start_duration_s: float
    metrics_endpoints: tuple[str, ...]

    def alive(self) -> bool:
        """Whether the server process still runs."""
        ...

    def stop(self) -> None:
        """End it and everything it started; returns when they are gone and the port is free. Never raises twice."""
        ...

    def last_words(self) -> str:
        """The last meaningful line of its log, to explain a failure."""
        ...

    def failure(self, moment: Moment) -> Failure:
        """What its log and its ending say about a failure."""
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

    def pace(self) -> Pace:
        """A rough forecast of how long it takes. Raises ModelError when there is no such model."""
        ...

    def drafter(self, name: str) -> str:
        """How this engine is told of a head or draft model: a known name, a path or an id, as it wants it."""
        ...

    def refusal(self, arm: Arm) -> str:
        """Why it cannot run this arm, one sentence; empty when it can (as far as can be told before a launch)."""
        ...

    def prepare(self, arms: Sequence[Arm], progress: FetchHook) -> None:
        """Get the model and every drafter onto this machine, before the first launch. Raises ModelError, FetchError."""
        ...

    def command(self, arm: Arm, port: int = DEFAULT_PORT) -> list[str]:
        """The command a person would type to serve this arm, as arguments (see ``shell_text``)."""
        ...

    def mended(self, arm: Arm, remedy: Remedy) -> Engine | None:
        """This engine changed as a remedy for a failed launch of the arm says; None when it cannot do that."""
        ...

    def start(self, arm: Arm, log_path: Path, on_stage: StageHook | None = None) -> RunningServer:
        """Start the arm on a free port of the loopback interface; returns after a real streamed answer.

        Raises EngineError with the reason found in the log.
        """
        ...


@runtime_checkable
class KeepsServing(Protocol):
    """An engine that leaves something running between its arms."""

    def close(self) -> None:
        """End it; may be called twice."""
        ...


def shell_text(argv: Sequence[str]) -> str:
    """Arguments as one line that a shell reads back unchanged."""
    return shlex.join(argv)
