"""The verdict on the terminal: a panel, the table of ratios, and the command on a line of its own that copies whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surespec.report.formats import interval, quantity, ratio
from surespec.report.view import View, build_view

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from surespec.core import Judgement

_COLOURS = {
    "keep": "green",
    "disable": "blue",
    "marginal": "yellow",
    "inconclusive": "yellow",
    "unfinished": "yellow",
    "not_lossless": "red",
    "failed": "red",
}


def terminal(judgement: Judgement | View, *, unbroken: bool = False) -> RenderableType:
    """The verdict as a rich renderable.

    ``unbroken`` leaves a command longer than the terminal on one line, which needs a console that does not crop;
    ``print_terminal`` sees to both. Otherwise the command is folded, so that none of it is lost.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.text import Text

    view = judgement if isinstance(judgement, View) else build_view(judgement, judgement.launches)
    colour = _COLOURS[view.status]
    body = Text.assemble((view.headline, "bold"), "\n", view.why)
    parts: list[RenderableType] = [
        Panel(body, title=Text(view.badge, style=f"bold {colour}"), title_align="left", border_style=colour)
    ]
    if view.rows:
        parts.append(Padding(_table(view), (0, 0, 0, 1)))
    parts.append(Padding(Text(view.lossless_text, style="dim"), (0, 0, 0, 1)))
    parts += [Padding(Text(f"Assumed: {text}", style="dim"), (0, 0, 0, 1)) for text in view.assumptions]
    parts += [Padding(Text(f"Warning: {text}", style="yellow"), (0, 0, 0, 1)) for text in view.warnings]
    if view.command:
        # At the left margin, without a box: what is selected is what runs.
        parts += ["", Text(view.command, no_wrap=unbroken, overflow="ignore" if unbroken else "fold", style="bold"), ""]
    return Group(*parts)


def print_terminal(judgement: Judgement | View, console: Console) -> None:
    """Print the verdict. The command is written as one unbroken line however narrow the terminal is."""
    console.print(terminal(judgement, unbroken=True), crop=False)


def _table(view: View) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("at", justify="right")
    table.add_column("metric")
    for name in ("baseline", view.candidate or "candidate", "ratio", view.interval_label):
        table.add_column(Text(name), justify="right")
    styles = {"better": "green", "worse": "red", "unclear": ""}
    previous = None
    for row in view.rows:
        table.add_row(
            f"c{row.concurrency}" if row.concurrency != previous else "",
            row.label,
            quantity(row.baseline, row.unit),
            quantity(row.candidate, row.unit),
            Text(ratio(row.ratio), style=styles[row.outcome]),
            interval(row.low, row.high),
            style="dim" if row.low is None else None,
        )
        previous = row.concurrency
    return table
