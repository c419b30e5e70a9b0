"""The main job: launch arms, measure them, decide, and keep everything on disk.

What to launch next follows from the launches so far (``tune_steps``), so an interrupted run goes on where it stopped.
Nothing is printed here; a ``TuneProgress`` is told what happens.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from surespec import tune_steps as steps
from surespec.bench.runner import BenchOptions, Progress, bench
from surespec.core import BASELINE, Arm, Judgement, Launch, Trace
from surespec.engines import Engine, make_engine
from surespec.engines.base import shell_text
from surespec.errors import BundleError, EndpointError, EngineError, Interrupted
from surespec.fetch import resolve_model
from surespec.rules import policy as find_policy
from surespec.store import Bundle, utc_now
from surespec.tune_plan import TuneOptions, TunePlan, plan_tune
from surespec.tune_steps import Goal, History

TraceSink = Callable[[int, Trace], None]
Clock = Callable[[], float]


class TuneProgress:
    """Told what ``tune`` does. Every method may be overridden; by default nothing happens."""

    def planned(self, plan: TunePlan) -> None:
        """Once, before anything is launched: ``plan.summary()`` is the sentence to show."""

    def fetching(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """A known model is being fetched; ``total_bytes`` is 0 while unknown."""

    def launch_begins(self, arm: Arm, number: int, expected: int, remaining_s: float) -> None:
        """Launch ``number`` of about ``expected`` begins; ``remaining_s`` is a forecast for all that is left."""

    def stage(self, text: str) -> None:
        """What the launch is doing: ``starting``, ``loading``, ``answering a first request``, ``stopping`` ..."""

    def benching(self, phase: str, concurrency: int, done: int, total: int) -> None:
        """Requests done of a phase (``check``, ``warmup``, ``run``) at one concurrency."""

    def launch_ends(self, launch: Launch) -> None:
        """A launch is over and on disk; ``launch.failure`` says why when its status is ``failed``."""

    def note(self, text: str) -> None:
        """Something a person should know, one sentence."""


class Measure(Protocol):
    """Runs one server life of an arm and measures it. Replaced in tests."""

    def __call__(self, arm: Arm, index: int, folder: Path, on_trace: TraceSink) -> Launch:
        """The launch; status ``failed`` with its reason instead of an exception. Lets KeyboardInterrupt pass, with
        the server stopped."""
        ...


def tune(
    options: TuneOptions,
    progress: TuneProgress | None = None,
    *,
    measure: Measure | None = None,
    clock: Clock = time.monotonic,
) -> Judgement:
    """Find the best speculation setting and the verdict on it; everything measured is in the bundle ``options.out``.

    ``measure`` and ``clock`` (seconds) are for tests. Raises UsageError, BundleError, ModelError before anything is
    launched, and Interrupted (the bundle can be resumed) on Ctrl-C.
    """
    progress = progress or TuneProgress()
    plan = _resumed_plan(options) if options.resume else plan_tune(options)
    if measure is None:
        _find_files(plan, progress)
    bundle = Bundle.open(options.out) if options.resume else _create(plan)
    options = plan.options
    with bundle.lock():
        history = _History(bundle)
        for problem in bundle.problems:
            progress.note(problem)
        plan = replace(plan, done=sum(launch.status == "ok" for launch in history.view.launches))
        progress.planned(plan)
        engine = make_engine(options.engine, model=options.model, precision=options.precision)
        goal = Goal(
            plan.probes, find_policy(options.policy), options.temperature, options.max_launches, engine.k_by_batch_size
        )
        measure = measure or EngineMeasure(engine, plan, progress)
        out_of_time = _launch_all(goal, history, plan, measure, progress, clock)
        judgement = _conclude(goal, history, plan, engine, out_of_time)
        bundle.write_judgement(judgement)
        bundle.event("judged", verdict=judgement.verdict, arm=judgement.arm)
    return judgement


class EngineMeasure:
    """``Measure`` with a real engine: start, benchmark at every concurrency, stop."""

    def __init__(self, engine: Engine, plan: TunePlan, progress: TuneProgress) -> None:
        self._engine = engine
        self._plan = plan
        self._progress = progress

    def __call__(self, arm: Arm, index: int, folder: Path, on_trace: TraceSink) -> Launch:
        """One launch; its server is gone when this returns or raises."""
        launch = Launch(
            index=index, arm=arm.name, status="failed", started_at=utc_now(),
            command=shell_text(self._engine.command(arm)), log=f"{folder.name}/server.log",
        )  # fmt: skip
        try:
            server = self._engine.start(arm, folder / "server.log", self._progress.stage)
        except EngineError as error:
            return launch.model_copy(update={"failure": error.message})
        try:
            result = bench(self._bench_options(server.endpoint), self._show, on_trace)
        except EndpointError as error:
            ended = "" if server.alive() else f" The server had ended; its last words: {server.last_words()}"
            return launch.model_copy(update={"failure": f"{error.message}{ended}"})
        finally:
            self._progress.stage("stopping")
            server.stop()
        return launch.model_copy(
            update={
                "status": "ok",
                "start_duration_s": server.start_duration_s,
                "runs": result.runs,
                "warnings": result.warnings,
            }
        )

    def _bench_options(self, endpoint: str) -> BenchOptions:
        options = self._plan.options
        return BenchOptions(
            endpoint=endpoint,
            concurrency=options.concurrency,
            prompts=options.prompts,
            num_prompts=self._plan.num_prompts,
            output_len=self._plan.output_len,
            temperature=options.temperature,
        )

    def _show(self, progress: Progress) -> None:
        self._progress.benching(progress.phase, progress.concurrency, progress.done, progress.total)


class _History:
    """The launches of a bundle, read once and kept up to date; what is recorded goes to disk first."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self._since = bundle.next_index()
        self._launches = list(bundle.launches(with_traces=True))

    @property
    def view(self) -> History:
        """The launches as ``tune_steps`` wants them."""
        return History(tuple(self._launches), self._since)

    @property
    def in_session(self) -> int:
        """Launches recorded since this session began."""
        return sum(launch.index >= self._since for launch in self._launches)

    def record(self, launch: Launch) -> None:
        """Write a launch and remember it."""
        self.bundle.write_launch(launch)
        self.bundle.event("launch_ended", index=launch.index, arm=launch.arm, status=launch.status)
        self._launches.append(launch)


def _find_files(plan: TunePlan, progress: TuneProgress) -> None:
    """Fetch a known model, and find every drafter, before the first launch. Raises ModelError or FetchError."""
    drafters = (arm.speculative_config.get("model") for arm in plan.probes if arm.speculative_config)
    for name in (plan.options.model, *drafters):
        if name is not None:
            resolve_model(name, progress.fetching)


def _create(plan: TunePlan) -> Bundle:
    chosen = replace(plan.options, num_prompts=plan.num_prompts, output_len=plan.output_len)
    bundle = Bundle.create(chosen.out, {"options": chosen.stored(), "machine": machine()})
    bundle.write_arms(plan.arms)
    return bundle


def _resumed_plan(options: TuneOptions) -> TunePlan:
    stored = Bundle.open(options.out).manifest.get("options")
    return plan_tune(options.restored(stored if isinstance(stored, dict) else {}))


def _launch_all(
    goal: Goal, history: _History, plan: TunePlan, measure: Measure, progress: TuneProgress, clock: Clock
) -> bool:
    """Launch until nothing more is to be learnt (False) or the budget is spent (True)."""
    begun, longest = clock(), 0.0
    while (arm := steps.next_arm(goal, history.view)) is not None:
        elapsed = clock() - begun
        if history.in_session and elapsed + longest > plan.options.budget_s:
            return True
        expected = max(plan.expected_launches, len(history.view.launches) + 1)
        left = expected - len(history.view.launches)
        remaining = min(plan.options.budget_s - elapsed, left * (longest or plan.launch_s))
        progress.launch_begins(arm, len(history.view.launches) + 1, expected, remaining)
        started = clock()
        launch = _launch(history, arm, measure, plan)
        longest = max(longest, clock() - started)
        history.bundle.write_arms(
            (BASELINE, *steps.known_arms(goal, history.view)), steps.arm_notes(goal, history.view)
        )
        progress.launch_ends(launch)
    return False


def _launch(history: _History, arm: Arm, measure: Measure, plan: TunePlan) -> Launch:
    """One launch, on disk whatever happens. Ctrl-C records it as interrupted and raises Interrupted."""
    bundle = history.bundle
    index = bundle.next_index()
    folder = bundle.launch_dir(index, arm.name)
    started_at = utc_now()
    bundle.event("launch_began", index=index, arm=arm.name)

    def keep(concurrency: int, trace: Trace) -> None:
        with contextlib.suppress(BundleError):  # writing the launch says so, outside of the benchmark's tasks
            bundle.append_trace(index, arm.name, concurrency, trace)

    try:
        launch = measure(arm, index, folder, keep)
    except (KeyboardInterrupt, Interrupted):
        stopped = Launch(
            index=index, arm=arm.name, status="interrupted", started_at=started_at, failure="stopped by the user"
        )
        history.record(stopped)
        out = shell_text([str(plan.options.out)])
        raise Interrupted(
            f"Interrupted; what was measured so far is in {plan.options.out}.",
            hint=f"Go on with: surespec tune --resume --out {out}",
        ) from None
    history.record(launch)
    return launch


def _conclude(goal: Goal, history: _History, plan: TunePlan, engine: Engine, out_of_time: bool) -> Judgement:
    """The judgement of the finalist, with all launches and what a reader should know of the other arms."""
    view = history.view
    baseline_command = shell_text(engine.command(BASELINE))
    best = steps.finalist(goal, view) if view.ok(BASELINE.name) else None
    if best is None:
        judgement = _nothing_to_judge(goal, view, baseline_command)
    else:
        judgement = steps.verdict(
            goal, view, best, command=shell_text(engine.command(best)), baseline_command=baseline_command
        )
    warnings = [*judgement.warnings, *_other_warnings(goal, view, best)]
    if out_of_time and judgement.verdict == "inconclusive":
        warnings.append(f"The budget of {plan.options.budget_s:.0f} s was spent before the verdict was safe.")
    warnings += history.bundle.problems
    return judgement.model_copy(
        update={
            "launches": view.launches,
            "warnings": tuple(dict.fromkeys(warnings)),
            "report": "" if judgement.verdict == "failed" else str(plan.options.out / "report.html"),
        }
    )


def _nothing_to_judge(goal: Goal, view: History, baseline_command: str) -> Judgement:
    """No baseline, or no candidate that ran: failed with the reasons; or no time for any: inconclusive."""
    failures = view.failed(BASELINE.name)
    if failures or not view.ok(BASELINE.name):
        reason = failures[-1].failure.rstrip(".") if failures else "it was not launched"
        why = (
            f"The baseline, the model without speculation, could not be measured: {reason}. "
            "Nothing can be compared without it, so make it work first."
        )
        return Judgement(verdict="failed", policy=goal.policy.name, why=why, command=baseline_command)
    reasons = [
        f"{probe.name} ({failed[-1].failure.rstrip('.')})"
        for probe in goal.probes
        if (failed := view.failed(probe.name))
    ]
    if reasons:
        why = (
            f"None of the settings could be measured: {'; '.join(reasons)}. "
            "The deployment without speculation works; go on using it."
        )
        return Judgement(verdict="failed", policy=goal.policy.name, why=why, command=baseline_command)
    why = (
        "Only the baseline was measured before the budget was spent, so there is nothing to compare it with. "
        "Go on with --resume and a larger --budget."
    )
    return Judgement(verdict="inconclusive", policy=goal.policy.name, why=why, command=baseline_command)


def _other_warnings(goal: Goal, view: History, best: Arm | None) -> list[str]:
    """Arms that failed, arms whose output is at fault, and what the benchmark warned of."""
    said = []
    for arm in steps.known_arms(goal, view):
        failures = view.failed(arm.name)
        if failures and not view.ok(arm.name):
            said.append(f"{arm.name} could not be measured: {failures[-1].failure}")
        elif best is not None and arm.name != best.name and view.ok(arm.name):
            report = steps.lossless(goal, view.ok(BASELINE.name), view.ok(arm.name))
            if report.lossless is False:
                said.append(f"{arm.name} changes the output: {report.detail}")
    for launch in view.launches:
        said += [f"{launch.arm}: {warning}" for warning in launch.warnings]
    return said


def machine() -> dict[str, Any]:
    """What the numbers were measured on, without anything that names the machine or its user."""
    import psutil

    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": _cpu_name(),
        "logical_cpus": os.cpu_count(),
        "physical_cpus": psutil.cpu_count(logical=False),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    """The processor's model name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
