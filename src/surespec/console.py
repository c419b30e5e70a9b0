"""What people see while they wait, and small tables. Progress goes to stderr and only to a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from surespec.bench.runner import Progress as BenchStage
    from surespec.core import Arm, BenchResult, Launch
    from surespec.tune import TuneProgress
    from surespec.tune_plan import TunePlan

_PHASES = {"check": "checking", "warmup": "warming up", "run": "measuring"}


def stdout_console() -> Console:
    """Results: no wrapping when piped, no colour where NO_COLOR or a pipe says so (rich honours both)."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200, highlight=False)


def stderr_console() -> Console:
    """Progress and messages."""
    return Console(file=sys.stderr, highlight=False)


@contextmanager
def transfer_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar in bytes for downloads; silent when stderr is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr_console(), transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("", total=None, visible=False)

        def show(what: str, done_bytes: int, total_bytes: int) -> None:
            bars.update(task, description=what, completed=done_bytes, total=total_bytes or None, visible=True)

        yield show


@contextmanager
def bench_progress() -> Iterator[Callable[[BenchStage], None]]:
    """A bar in requests for a benchmark; silent when stderr is not a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
    )
    with Progress(*columns, console=stderr_console(), transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("", total=None, visible=False)

        def show(stage: BenchStage) -> None:
            what = f"{_PHASES[stage.phase]} at concurrency {stage.concurrency}"
            bars.update(task, description=what, completed=stage.done, total=stage.total, visible=True)

        yield show


@contextmanager
def tune_progress() -> Iterator[TuneProgress]:
    """The plan in one line, then a bar and a line for each finished launch; only the plan when not a terminal."""
    from surespec.tune import TuneProgress
    from surespec.tune_plan import spoken_duration

    console = stderr_console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rest]}"))
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("planning", total=None, rest="")

        class Shown(TuneProgress):
            """Draws on the bar above."""

            _launch = ""

            def planned(self, plan: TunePlan) -> None:
                console.print(plan.summary(), soft_wrap=True, markup=False)
                for remark in plan.remarks:
                    console.print(remark, soft_wrap=True, markup=False)

            def fetching(self, what: str, done: int, total: int) -> None:
                bars.update(task, description=what, completed=done, total=total or None)

            def launch_begins(self, arm: Arm, number: int, expected: int, remaining_s: float) -> None:
                self._launch = f"launch {number} of about {expected}: {arm.name}"
                rest = f"about {spoken_duration(remaining_s)} left"
                bars.update(task, description=f"{self._launch}, starting", completed=0, total=None, rest=rest)

            def stage(self, text: str) -> None:
                bars.update(task, description=f"{self._launch}, {text}")

            def benching(self, phase: str, concurrency: int, done: int, total: int) -> None:
                bars.update(
                    task,
                    description=f"{self._launch}, {_PHASES.get(phase, phase)} at concurrency {concurrency}",
                    completed=done,
                    total=total,
                )

            def launch_ends(self, launch: Launch) -> None:
                if bars.disable:
                    return
                speeds = ", ".join(f"{r.throughput_tok_s:.1f} tok/s at {r.concurrency}" for r in launch.runs)
                console.print(f"  {launch.arm:<16} {launch.failure or speeds}", soft_wrap=True, markup=False)

            def note(self, text: str) -> None:
                console.print(f"note: {text}", soft_wrap=True, markup=False)

        yield Shown()


def bench_table(result: BenchResult) -> Table:
    """One row a concurrency; times in milliseconds."""
    table = Table(title=f"{result.model} at {result.endpoint}", title_justify="left")
    for name in ("concurrency", "requests", "failed", "tok/s", "TTFT p50", "TPOT p50", "TPOT p99", "E2E p50",
                 "tokens/chunk", "acceptance length"):  # fmt: skip
        table.add_column(name, justify="right")
    for run in result.runs:
        accepted = f"{run.acceptance.length:.2f}" if run.acceptance and run.acceptance.drafts else "-"
        table.add_row(
            str(run.concurrency),
            str(run.num_requests),
            str(run.failed),
            f"{run.throughput_tok_s:.1f}",
            _ms(run.ttft_ms_p50),
            _ms(run.tpot_ms_p50),
            _ms(run.tpot_ms_p99),
            _ms(run.e2e_latency_ms_p50),
            f"{run.tokens_per_chunk:.2f}",
            accepted,
        )
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
