"""The measurements as CSV: one line a run, for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from surespec.core import Launch, Run

_RUN_FIELDS = tuple(name for name in Run.model_fields if name not in {"acceptance", "by_category", "traces"})
_ACCEPTANCE_FIELDS = ("drafts", "drafted", "accepted", "rate", "length")
COLUMNS = (
    "launch",
    "arm",
    "status",
    "started_at",
    "start_duration_s",
    *_RUN_FIELDS,
    *(f"acceptance_{name}" for name in _ACCEPTANCE_FIELDS),
    "acceptance_per_position",
    "failure",
)


def render_csv(launches: Sequence[Launch]) -> str:
    """One line a run, units in the column names; p_i joined by blanks. A launch without a run keeps a line of its own,
    so that failures are seen. Times as in ``core.Run``; an empty cell was not measured."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for launch in launches:
        common: dict[str, object] = {
            "launch": launch.index,
            "arm": launch.arm,
            "status": launch.status,
            "started_at": launch.started_at,
            "start_duration_s": launch.start_duration_s,
            "failure": launch.failure,
        }
        common = {name: _plain(cell) for name, cell in common.items()}
        for run in launch.runs:
            writer.writerow({**common, **_cells(run)})
        if not launch.runs:
            writer.writerow(common)
    return out.getvalue()


def _plain(cell: object) -> object:
    """An apostrophe before a text that a spreadsheet would compute: an engine's own words may begin with ``=``."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def _cells(run: Run) -> dict[str, object]:
    cells: dict[str, object] = {name: getattr(run, name) for name in _RUN_FIELDS}
    if run.acceptance is not None:
        cells |= {f"acceptance_{name}": getattr(run.acceptance, name) for name in _ACCEPTANCE_FIELDS}
        cells["acceptance_per_position"] = " ".join(f"{p:.4f}" for p in run.acceptance.per_position)
    return cells
