"""A Dynamo that goes on serving while its workers are replaced, one at a time (``tune --roll``).

The frontend and its router live from the first arm to the end of the run. For another arm a worker with it is started
beside the others, and one of the old ones ends once the router lists the new one; its requests are finished or migrate.
So there is never a moment without a worker, and one worker more than usual has to fit into memory.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surespec.core import Arm
from surespec.engines.base import DEFAULT_PORT, FetchHook, RunningServer, StageHook
from surespec.engines.dynamo import POLL_S, START_TIMEOUT_S, DynamoEngine, listed_workers, system_ports
from surespec.engines.failures import Failure, Moment, Remedy
from surespec.engines.pace import Pace
from surespec.engines.process import HOST, ServerProcess, first_request, free_port, launch_process
from surespec.errors import EngineError


@dataclass
class Fleet:
    """What runs: the frontend, and each worker with its system port. Empty before the first arm and after ``close``."""

    frontend: ServerProcess | None = None
    workers: list[tuple[ServerProcess, int]] = field(default_factory=list)
    folder: str = ""
    port: int = 0

    @property
    def processes(self) -> list[ServerProcess]:
        """The workers, then the frontend."""
        return [*(process for process, _ in self.workers), *([self.frontend] if self.frontend else [])]

    def close(self) -> None:
        """End everything; may be called twice."""
        for process in self.processes:
            with contextlib.suppress(EngineError):
                process.stop()
        self.frontend, self.workers = None, []
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""


@dataclass
class Parked:
    """One arm on the fleet. ``stop`` leaves the fleet serving: the next arm replaces its workers."""

    fleet: Fleet
    endpoint: str
    pid: int
    start_duration_s: float
    metrics_endpoints: tuple[str, ...]

    def alive(self) -> bool:
        """Whether the frontend and every worker run."""
        return bool(self.fleet.processes) and all(process.alive() for process in self.fleet.processes)

    def stop(self) -> None:
        """Nothing: see the class."""

    def last_words(self) -> str:
        """Those of what has ended, else of the frontend."""
        return self._told().last_words()

    def failure(self, moment: Moment) -> Failure:
        """By the log of what has ended, else of the frontend."""
        return self._told().failure(moment)

    def _told(self) -> ServerProcess:
        ended = [process for process in self.fleet.processes if not process.alive()]
        return ended[0] if ended else self.fleet.processes[-1]


@dataclass(frozen=True)
class RollingDynamo:
    """``DynamoEngine`` with arms rolled over one fleet. ``close`` ends it."""

    inner: DynamoEngine
    fleet: Fleet = field(default_factory=Fleet)

    @property
    def name(self) -> str:
        """As the engine's."""
        return self.inner.name

    @property
    def k_by_batch_size(self) -> bool:
        """As the engine's."""
        return self.inner.k_by_batch_size

    def pace(self) -> Pace:
        """As the engine's."""
        return self.inner.pace()

    def drafter(self, name: str) -> str:
        """As the engine's."""
        return self.inner.drafter(name)

    def refusal(self, arm: Arm) -> str:
        """As the engine's."""
        return self.inner.refusal(arm)

    def prepare(self, arms: Sequence[Arm], progress: FetchHook) -> None:
        """As the engine's."""
        self.inner.prepare(arms, progress)

    def command(self, arm: Arm, port: int = DEFAULT_PORT) -> list[str]:
        """As the engine's."""
        return self.inner.command(arm, port)

    def mended(self, arm: Arm, remedy: Remedy) -> RollingDynamo | None:
        """The engine mended, on the same fleet."""
        inner = self.inner.mended(arm, remedy)
        return None if inner is None else RollingDynamo(inner, self.fleet)

    def close(self) -> None:
        """End the frontend and all workers."""
        self.fleet.close()

    def start(self, arm: Arm, log_path: Path, on_stage: StageHook | None = None) -> RunningServer:
        """Start the fleet with the arm, or roll the arm over it; returns after a streamed answer.

        Raises EngineError; the whole fleet is ended then, and the next arm starts another.
        """
        stage = on_stage or (lambda _text: None)
        begun = time.monotonic()
        deadline = begun + START_TIMEOUT_S
        try:
            if self.fleet.frontend is None or not all(process.alive() for process in self.fleet.processes):
                self.fleet.close()
                stage("starting")
                self._begin(arm, log_path)
                self._wait(lambda: listed_workers(self.fleet.port) == len(self.fleet.workers), deadline)
            else:
                for number in range(len(self.fleet.workers)):
                    stage(f"replacing worker {number + 1} of {len(self.fleet.workers)}")
                    self._replace_oldest(arm, log_path, deadline)
            stage("answering a first request")
            assert self.fleet.frontend is not None
            first_request(self.fleet.frontend, self.fleet.port, deadline)
        except BaseException:
            self.fleet.close()
            raise
        return Parked(
            self.fleet,
            endpoint=f"http://{HOST}:{self.fleet.port}",
            pid=self.fleet.frontend.pid,
            start_duration_s=time.monotonic() - begun,
            metrics_endpoints=tuple(f"http://{HOST}:{port}" for _, port in self.fleet.workers),
        )

    def _begin(self, arm: Arm, log_path: Path) -> None:
        fleet = self.fleet
        fleet.folder, fleet.port = tempfile.mkdtemp(prefix="surespec-dynamo-"), free_port()
        argv = self.inner.frontend_argv(fleet.port, migrate=True)
        env = {**self.inner.environment(fleet.folder), "DYN_LOG": "warn"}
        fleet.frontend = launch_process(argv, port=fleet.port, log_path=log_path, engine=self.name, env=env)
        for port in system_ports(self.inner.settings.workers):
            fleet.workers.append((self._worker(arm, port, len(fleet.workers), log_path), port))

    def _replace_oldest(self, arm: Arm, log_path: Path, deadline: float) -> None:
        fleet = self.fleet
        count = len(fleet.workers)
        (port,) = system_ports(1)
        fleet.workers.append((self._worker(arm, port, port % 1000, log_path), port))
        self._wait(lambda: listed_workers(fleet.port) == count + 1, deadline)
        old, _ = fleet.workers.pop(0)
        old.stop()
        self._wait(lambda: listed_workers(fleet.port) == count, deadline)

    def _worker(self, arm: Arm, port: int, number: int, log_path: Path) -> ServerProcess:
        env = {**self.inner.environment(self.fleet.folder), **self.inner.worker_environment(port, number)}
        return launch_process(
            self.inner.worker.argv(arm, typed=False), port=port, log_path=log_path, engine=self.name, env=env
        )

    def _wait(self, done: Callable[[], bool], deadline: float) -> None:
        while not done():
            for process in self.fleet.processes:
                if not process.alive():
                    words = process.last_words()
                    raise EngineError(
                        f"A part of Dynamo ended while starting{f': {words}' if words else ''}.",
                        hint=f"Its log: {process.log_path}",
                        failure=process.failure("start"),
                    )
            if time.monotonic() >= deadline:
                raise EngineError("Dynamo's frontend did not list the workers in time.")
            time.sleep(POLL_S)
