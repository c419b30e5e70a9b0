"""The main job: launch arms, measure them, decide, and keep everything on disk.

What to launch next follows from the launches so far (``tune_steps``), so an interrupted run goes on where it stopped.
Nothing is printed here; a ``TuneProgress`` is told what happens.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from surespec import tune_steps as steps
from surespec.core import BASELINE, Arm, Judgement, Launch, Trace
from surespec.engines import Engine
from surespec.engines.base import KeepsServing, shell_text
from surespec.engines.from_recipe import RecipeEngine
from surespec.engines.handover import handed_over
from surespec.errors import BundleError, ConfigError, Interrupted
from surespec.input_files import read_input
from surespec.recipe.read import MAX_BYTES, read_recipe
from surespec.rules import policy as find_policy
from surespec.store import Bundle, utc_now
from surespec.tune_existing import check_existing, leave_running
from surespec.tune_measure import EngineMeasure, Measure
from surespec.tune_plan import MIN_LAUNCHES, TuneOptions, TunePlan, engine_for, plan_tune
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
    engine = engine_for(plan.options)
    existing = check_existing(plan) if measure is None else ()
    if measure is None:
        engine.prepare(plan.arms, progress.fetching)
    bundle = Bundle.open(options.out) if options.resume else _create(plan)
    options = plan.options
    with _told_how_to_go_on(options), bundle.lock():
        history = _History(bundle)
        for problem in bundle.problems:
            progress.note(problem)
        plan = replace(plan, done=sum(launch.status == "ok" for launch in history.view.launches))
        progress.planned(plan)
        goal = Goal(
            plan.probes, find_policy(options.policy), options.temperature, options.max_launches, engine.k_by_batch_size
        )
        measure = measure or EngineMeasure(engine, plan, progress)
        with handed_over(existing, bundle.path, progress.note, bundle.event) as hand_over, _ended(engine):
            out_of_time = _launch_all(goal, history, plan, measure, progress, clock)
            if isinstance(measure, EngineMeasure):
                engine = measure.engine  # with what had to be changed to make it start
            judgement = _conclude(goal, history, plan, engine, out_of_time)
            bundle.write_judgement(judgement)
            bundle.event("judged", verdict=judgement.verdict, arm=judgement.arm)
            if options.recipe and judgement.verdict in ("keep", "disable"):
                _say_apply(options, judgement, progress)
            if options.apply:
                leave_running(hand_over, judgement, progress.note)
    return judgement


@contextlib.contextmanager
def _told_how_to_go_on(options: TuneOptions) -> Iterator[None]:
    """Ctrl-C, whenever it comes, ends a run that can be resumed, and says how."""
    try:
        yield
    except KeyboardInterrupt:
        raise _interrupted(options) from None


def _interrupted(options: TuneOptions) -> Interrupted:
    return Interrupted(
        f"Interrupted; what was measured so far is in {options.out}.",
        hint=f"Go on with: surespec tune --resume --out {shell_text([str(options.out)])}",
    )


@contextlib.contextmanager
def _ended(engine: Engine) -> Iterator[None]:
    """An engine that keeps something running between its arms ends it here, whatever happens."""
    try:
        yield
    finally:
        if isinstance(engine, KeepsServing):
            engine.close()


def _say_apply(options: TuneOptions, judgement: Judgement, progress: TuneProgress) -> None:
    """How to write the verdict into the recipe, where it differs from what stands there."""
    recipe = read_recipe(Path(options.recipe or ""), service=options.service)
    if judgement.verdict == "disable" and not recipe.speculates:
        return
    out = shell_text([str(options.out)])
    what = "it" if judgement.verdict == "keep" else "the recipe without speculation"
    progress.note(f"To write {what} into {options.recipe}: surespec apply {out} (and surespec undo {out} to go back).")


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


def _create(plan: TunePlan) -> Bundle:
    chosen = replace(plan.options, num_prompts=plan.num_prompts, output_len=plan.output_len)
    fixed = {"recipe_sha256": _recipe_hash(chosen)} if chosen.recipe else {}
    return Bundle.create(chosen.out, {"options": chosen.stored(), "machine": machine(), **fixed})


def _resumed_plan(options: TuneOptions) -> TunePlan:
    manifest = Bundle.open(options.out).manifest
    stored = manifest.get("options")
    restored = options.restored(stored if isinstance(stored, dict) else {})
    if restored.recipe and manifest.get("recipe_sha256") != _recipe_hash(restored):
        raise ConfigError(
            f"{restored.recipe} was changed since the run in {options.out} began, so its launches cannot be compared.",
            hint="Put it back (surespec undo, if apply changed it), or begin another run.",
        )
    return plan_tune(restored)


def _recipe_hash(options: TuneOptions) -> str:
    data = read_input(Path(options.recipe or ""), what="a recipe", most_bytes=MAX_BYTES, hint="Name the recipe.")
    return hashlib.sha256(data).hexdigest()


def _launch_all(
    goal: Goal, history: _History, plan: TunePlan, measure: Measure, progress: TuneProgress, clock: Clock
) -> bool:
    """Launch until nothing more is to be learnt (False) or the budget is spent (True)."""
    begun, longest = clock(), 0.0
    again: Arm | None = None
    if history.view.launches:
        _keep_arms(goal, history)  # anew: the file may have been cut off
    else:
        history.bundle.write_arms(plan.arms)
    while (arm := again or steps.next_arm(goal, history.view)) is not None:
        elapsed = clock() - begun
        if history.in_session and elapsed + longest > plan.options.budget_s:
            return True
        expected = max(plan.expected_launches, len(history.view.launches) + 1)
        left = expected - len(history.view.launches)
        remaining = min(plan.options.budget_s - elapsed, left * (longest or plan.launch_s))
        progress.launch_begins(arm, len(history.view.launches) + 1, expected, remaining)
        started = clock()
        if isinstance(measure, EngineMeasure):
            measure.doubtful = steps.doubtful(goal, history.view) if arm.is_baseline else {}
        launch = _launch(history, arm, measure, plan)
        longest = max(longest, clock() - started)
        _keep_arms(goal, history)
        progress.launch_ends(launch)
        again = arm if _mended(arm, launch, measure, progress) else None
    return False


def _keep_arms(goal: Goal, history: _History) -> None:
    arms = (BASELINE, *steps.known_arms(goal, history.view))
    history.bundle.write_arms(arms, steps.arm_notes(goal, history.view))


def _mended(arm: Arm, launch: Launch, measure: Measure, progress: TuneProgress) -> bool:
    """Whether a failed launch is to be tried again, changed by the remedy of its kind of failure."""
    if launch.status != "failed" or not isinstance(measure, EngineMeasure):
        return False
    remedy = measure.mend(arm)
    if remedy is None:
        return False
    progress.note(f"{arm.name} failed ({launch.failure.rstrip('.')}). Trying again: {remedy}.")
    return True


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
        raise _interrupted(plan.options) from None
    history.record(launch)
    return launch


def _conclude(goal: Goal, history: _History, plan: TunePlan, engine: Engine, out_of_time: bool) -> Judgement:
    """The judgement of the finalist, with all launches and what a reader should know of the other arms."""
    view = history.view
    baseline_command = shell_text(engine.command(BASELINE))
    best = steps.finalist(goal, view) if view.ok(BASELINE.name) else None
    if best is None:
        judgement = _nothing_to_judge(goal, view, baseline_command, plan.options)
    else:
        judgement = steps.verdict(
            goal, view, best, command=shell_text(engine.command(best)), baseline_command=baseline_command
        )
    if best is not None:
        judgement = judgement.model_copy(update={"stopped": _why_it_stopped(goal, view, best, judgement, out_of_time)})
    warnings = [*judgement.warnings, *_other_warnings(goal, view, best)]
    if isinstance(engine, RecipeEngine) and engine.utilization is not None:
        judgement = judgement.model_copy(update={"gpu_memory_utilization": engine.utilization})
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


def _why_it_stopped(goal: Goal, view: History, best: Arm, judgement: Judgement, out_of_time: bool) -> str:
    """Why nothing more was launched, one sentence."""
    done = min(len(view.ok(BASELINE.name)), len(view.ok(best.name)))
    each = f"{done} launches of each arm" if done > 1 else "one launch of each arm"
    if judgement.verdict != "inconclusive" and done >= MIN_LAUNCHES:
        return f"Stopped after {each}: the verdict was safe."
    if out_of_time:
        return f"Stopped after {each}: the budget was spent."
    if done >= goal.max_launches:
        return f"Stopped after {each}, the most there may be."
    return f"Stopped after {each}: an arm failed to start again."


def _nothing_to_judge(goal: Goal, view: History, baseline_command: str, options: TuneOptions) -> Judgement:
    """No baseline, or no candidate that ran: failed with the reasons; or no time for any: inconclusive."""
    failures = view.failed(BASELINE.name)
    if failures or not view.ok(BASELINE.name):
        reason = steps.why_failed(failures[-1]).rstrip(".") if failures else "it was not launched"
        why = (
            f"The baseline, the model without speculation, could not be measured: {reason}. "
            "Nothing can be compared without it, so make it work first."
        )
        return Judgement(verdict="failed", policy=goal.policy.name, why=why, command=baseline_command)
    reasons = [
        f"{probe.name} ({steps.why_failed(failed[-1]).rstrip('.')})"
        for probe in goal.probes
        if (failed := view.failed(probe.name))
    ]
    if reasons:
        why = (
            f"None of the settings could be measured: {'; '.join(reasons)}. "
            "The deployment without speculation works; go on using it."
        )
        return Judgement(verdict="failed", policy=goal.policy.name, why=why, command=baseline_command)
    longer = max(20, round(options.budget_s / 30))
    why = (
        "Only the baseline was measured before the budget was spent, so there is nothing to compare it with. "
        f"Go on with: surespec tune --resume --out {shell_text([str(options.out)])} --budget {longer}m."
    )
    return Judgement(verdict="inconclusive", policy=goal.policy.name, why=why, command=baseline_command)


def _other_warnings(goal: Goal, view: History, best: Arm | None) -> list[str]:
    """Arms that failed, arms whose output is at fault, and what the benchmark warned of."""
    said = []
    for arm in steps.known_arms(goal, view):
        failures = view.failed(arm.name)
        if failures and not view.ok(arm.name):
            said.append(f"{arm.name} could not be measured: {_with_rest(failures[-1])}")
        elif best is not None and arm.name != best.name and view.ok(arm.name):
            report = steps.lossless(goal, view.ok(BASELINE.name), view.ok(arm.name))
            if report.lossless is False:
                said.append(f"{arm.name} changes the output: {report.detail}")
    for launch in view.launches:
        said += [f"{launch.arm}: {warning}" for warning in launch.warnings]
    return said


def _with_rest(failed: Launch) -> str:
    """Why a launch failed, what was tried before it, and what remains to try."""
    tried = f" Tried: {', '.join(failed.tried)}." if failed.tried else ""
    remains = f" What remains: {'; '.join(failed.remains)}." if failed.remains else ""
    return f"{steps.why_failed(failed)}{tried}{remains}"


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
