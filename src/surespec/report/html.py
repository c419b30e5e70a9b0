"""The view as one HTML page that needs nothing but itself: no script, style, font or picture from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from surespec.report.formats import interval, plain, quantity, ratio
from surespec.report.plots import acceptance_svg, k_curve_svg, speedup_svg, throughput_svg, timeline_svg
from surespec.report.view import View

if TYPE_CHECKING:
    from jinja2 import Template

_COMMAND_NOTES = {
    "keep": "This starts the deployment with the recommended setting.",
    "marginal": "This starts the deployment with the setting above; without speculation it is nearly as fast.",
    "disable": "This starts the deployment without speculation.",
}
_OTHER_NOTE = "No change is recommended on this evidence; this is the command the verdict names."


@dataclass(frozen=True, slots=True)
class _Plot:
    name: str
    title: str
    caption: str
    svg: object


def render_html(view: View) -> str:
    """The whole page as text. All text of the view is escaped; the same view gives the same text."""
    return _template().render(view=view, plots=_plots(view), command_note=_COMMAND_NOTES.get(view.status, _OTHER_NOTE))


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("surespec.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        quantity=quantity, ratio=ratio, plain=plain, interval=lambda row: interval(row.low, row.high)
    )
    return environment.get_template("template.html.j2")


def _plots(view: View) -> list[_Plot]:
    """The plots that have data, in reading order."""
    from markupsafe import Markup

    at = f" at concurrency {view.category_concurrency}" if view.category_concurrency else ""
    drawn = [
        _Plot(
            "speedup",
            "Speed-up by kind of work",
            f"Baseline TPOT / candidate TPOT{at}, median over prompts; the thin line spans the middle half of them.",
            speedup_svg(view),
        ),
        _Plot(
            "acceptance",
            "How much of a draft is accepted",
            "p_i: share of drafts whose first i tokens were all accepted.",
            acceptance_svg(view),
        ),
        _Plot(
            "kcurve",
            "Speed over k, predicted and measured",
            "Tokens a second of one user; the band is the interval of the prediction from the first probe.",
            k_curve_svg(view),
        ),
        _Plot(
            "throughput",
            "Throughput against concurrency",
            "All output tokens a second, mean of the launches; the baseline is dashed.",
            throughput_svg(view),
        ),
        _Plot(
            "timeline",
            "Launches in time",
            "Pale: the server loads. Solid: it is measured. Hatched: it failed.",
            timeline_svg(view),
        ),
    ]
    # The SVG is our own drawing: matplotlib escapes the names inside it.
    return [_Plot(plot.name, plot.title, plot.caption, Markup(plot.svg)) for plot in drawn if plot.svg]
