"""From a run bundle to what people read: one view model, shown on the terminal, as CSV and as one offline HTML page.

The JSON form of the verdict is the bundle's ``judgement.json`` (``Judgement.document``); nothing is written twice.
"""

from __future__ import annotations

from pathlib import Path

from surespec.report.html import render_html
from surespec.report.table import render_csv
from surespec.report.terminal import print_terminal, terminal
from surespec.report.view import View, build_view


def write_report(bundle_dir: Path) -> Path:
    """Write ``report.html`` and ``report.csv`` into the bundle and return the path of the page.

    Works for every verdict and for a bundle without one. Raises BundleError when the bundle cannot be read or the files
    cannot be written; an older report stays whole in that case.
    """
    from surespec.store import Bundle, write_text

    bundle = Bundle.open(bundle_dir)
    launches = bundle.launches(with_traces=True)
    view = build_view(
        bundle.judgement(),
        launches,
        manifest=bundle.manifest,
        arms=bundle.arms(),
        notes=bundle.arm_notes(),
        problems=bundle.problems,
    )
    page = bundle_dir / "report.html"
    write_text(bundle_dir / "report.csv", render_csv(launches))
    write_text(page, render_html(view))
    return page


__all__ = ["View", "build_view", "print_terminal", "render_csv", "render_html", "terminal", "write_report"]
