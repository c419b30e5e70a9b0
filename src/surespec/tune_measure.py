"""One launch of ``tune`` with a real engine: start, benchmark, stop; and what to try when it fails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from surespec.bench.gaps import measure_gaps
from surespec.bench.runner import BenchOptions, Progress, bench
from surespec.bench.workload import load_workload
from surespec.core import Arm, BenchResult, Gap, Launch
from surespec.engines.base import Engine, RunningServer, shell_text
from surespec.engines.endpoint import ManagedEngine
from surespec.engines.failures import Failure, next_remedy, remaining
from surespec.errors import EndpointError, EngineError
from surespec.store import utc_now
from surespec.tune_plan import TunePlan

if TYPE_CHECKING:
    from surespec.tune import TraceSink, TuneProgress

END_S = 3.0
MAX_REMEDIES = 4
"""Most relaunches of one arm because of failures, whatever the table would still offer."""

_PLAIN = ("unknown", "hang", "crash_first_request", "crash_under_load")
"""Kinds whose own sentence says less than what was seen."""


class Measure(Protocol):
    """Runs one server life of an arm and measures it. Replaced in tests."""

    def __call__(self, arm: Arm, index: int, folder: Path, on_trace: TraceSink) -> Launch:
        """The launch; status ``failed`` with its reason instead of an exception. Lets KeyboardInterrupt pass, with
        the server stopped."""
        ...


class EngineMeasure:
    """``Measure`` with a real engine. ``engine`` changes when a remedy changes how it is launched."""

    def __init__(self, engine: Engine, plan: TunePlan, progress: TuneProgress) -> None:
        self.engine = engine
        self._plan = plan
        self._progress = progress
        self._failure: Failure | None = None
        self._tried: dict[str, list[str]] = {}
        self.doubtful: dict[str, tuple[int, str]] = {}
        """Prompts to ask this launch for the gap between its best tokens (``tune_steps.doubtful``)."""

    def __call__(self, arm: Arm, index: int, folder: Path, on_trace: TraceSink) -> Launch:
        """One launch; its server is gone when this returns or raises."""
        self._failure = None
        launch = Launch(
            index=index, arm=arm.name, status="failed", started_at=utc_now(),
            command=shell_text(self.engine.command(arm)), log=f"{folder.name}/server.log",
            tried=tuple(self._tried.get(arm.name, ())),
        )  # fmt: skip
        if isinstance(self.engine, ManagedEngine):
            self._progress.note(self.engine.instruction(arm))
        try:
            server = self.engine.start(arm, folder / "server.log", self._progress.stage)
        except EngineError as error:
            return self._failed(launch, error.message, error.failure)
        try:
            result = bench(self._bench_options(server), self._show, on_trace)
            if broken := _broken(server, result):
                return self._failed(launch, broken, server.failure("load"))
            gaps = self._gaps(server.endpoint)
        except EndpointError as error:
            ended = f" The server had ended; its last words: {server.last_words()}" if has_ended(server) else ""
            return self._failed(launch, f"{error.message}{ended}", server.failure("load"))
        finally:
            self._progress.stage("stopping")
            server.stop()
        return launch.model_copy(
            update={
                "status": "ok",
                "start_duration_s": server.start_duration_s,
                "runs": result.runs,
                "gaps": gaps,
                "warnings": result.warnings,
            }
        )

    def _gaps(self, endpoint: str) -> tuple[Gap, ...]:
        if not self.doubtful:
            return ()
        self._progress.stage("asking again where texts differ")
        prompts = load_workload(self._plan.options.prompts, self._plan.options.num_prompts).prompts
        return measure_gaps(endpoint, prompts, self.doubtful, output_len=self._plan.output_len)

    def mend(self, arm: Arm) -> str | None:
        """After a failed launch: change what the next remedy says and tell it in words; None when nothing is left.

        Ends always: every remedy has a number of times, and an arm has at most ``MAX_REMEDIES``.
        """
        tried = self._tried.setdefault(arm.name, [])
        if self._failure is None:
            return None
        while len(tried) < MAX_REMEDIES and (remedy := next_remedy(self._failure, tried)) is not None:
            if remedy.name == "disable":
                return None  # leaving the arm out is what tune does with an arm that fails
            tried.append(remedy.name)
            mended = self.engine.mended(arm, remedy)
            if mended is not None:
                self.engine = mended
                return remedy.say
        return None

    def _failed(self, launch: Launch, message: str, failure: Failure | None) -> Launch:
        """The launch with why it failed and what is left for a person to try."""
        self._failure = failure
        if failure is None:
            return launch.model_copy(update={"failure": message})
        said = message
        if failure.kind not in _PLAIN:
            evidence = failure.evidence if failure.evidence not in failure.sentence else ""
            said = f"{failure.sentence} The log says: {evidence}" if evidence else failure.sentence
        left = [remedy.say for remedy in remaining(failure, self._tried.get(launch.arm, ())) if remedy.by == "person"]
        return launch.model_copy(update={"failure": said, "failure_kind": failure.kind, "remains": tuple(left)})

    def _bench_options(self, server: RunningServer) -> BenchOptions:
        options = self._plan.options
        return BenchOptions(
            endpoint=server.endpoint,
            metrics_endpoints=server.metrics_endpoints,
            concurrency=options.concurrency,
            prompts=options.prompts,
            num_prompts=self._plan.num_prompts,
            output_len=self._plan.output_len,
            temperature=options.temperature,
            timeout_s=options.timeout_s,
        )

    def _show(self, progress: Progress) -> None:
        self._progress.benching(progress.phase, progress.concurrency, progress.done, progress.total)


def has_ended(server: RunningServer) -> bool:
    """Whether the server is gone. Its sockets close before its process ends, so that may take a moment."""
    deadline = time.monotonic() + END_S
    while server.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not server.alive()


def _broken(server: RunningServer, result: BenchResult) -> str:
    """Why a benchmark that came to its end does not count: the server died in it. Empty when it counts."""
    failed = sum(run.failed for run in result.runs)
    if not failed or not has_ended(server):
        return ""
    return f"The server ended while it was measured ({failed} requests failed); its last words: {server.last_words()}"
