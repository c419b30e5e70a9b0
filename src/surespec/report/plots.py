"""The plots of the report as inline SVG, drawn by matplotlib without a display.

Colours are written as place-holders and replaced by CSS variables, so that a plot follows the page's light or dark
mode; text stays text in the page's own font. The same view gives the same bytes: no date, fixed hash salt, and ids
prefixed by the plot's name, as several plots share one page. matplotlib is imported only when a plot is drawn.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from surespec.report.summaries import ArmRow, CategoryRow, LaunchBar
from surespec.report.view import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, FAINT, ACCENT, BASE, BAD = ("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05", "#0a0b06")
_CSS = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    FAINT: "var(--rule)",
    ACCENT: "var(--accent)",
    BASE: "var(--base)",
    BAD: "var(--bad)",
}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "hatch.linewidth": 1.5,
}
_WIDTH_IN = 4.8
_LONGEST_LABEL = 22


def speedup_svg(view: View) -> str:
    """Bars: speed-up by workload category (baseline TPOT / candidate TPOT), with a line at 1. Empty without data."""
    rows: Sequence[CategoryRow] = tuple(reversed(view.categories))
    if not rows:
        return ""
    with _canvas("speedup", 0.9 + 0.36 * len(rows)) as (_, axes, out):
        for y, row in enumerate(rows):
            axes.barh(y, row.speedup, height=0.62, color=ACCENT if row.speedup >= 1 else BAD)
            end = row.speedup
            if row.low is not None and row.high is not None:
                axes.plot([row.low, row.high], [y, y], color=INK, linewidth=1.4, solid_capstyle="butt")
                end = max(end, row.high)
            # A label of a slower category stands beyond the line at 1, not on it.
            axes.annotate(
                f"{row.speedup:.2f}×", (max(end, 1.0), y), xytext=(5, 0), textcoords="offset points", va="center"
            )
        axes.axvline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(rows)), [_short(row.category) for row in rows])
        axes.set_xlim(0, 1.18 * max(1.05, *(max(row.speedup, row.high or 0) for row in rows)))
        axes.set_xlabel("times as fast as without speculation")
        axes.spines["left"].set_visible(False)
    return out[0]


def acceptance_svg(view: View) -> str:
    """Bars: p_i of the candidate by position, with every other arm that drafted as a thin line. Empty without data."""
    drafted = [arm for arm in view.arms if arm.per_position]
    if not drafted:
        return ""
    main = next((arm for arm in drafted if arm.role == "candidate"), drafted[0])
    with _canvas("acceptance", 2.7) as (_, axes, out):
        positions = range(1, len(main.per_position) + 1)
        axes.bar(positions, main.per_position, width=0.62, color=ACCENT, label=_short(main.name))
        for x, p in zip(positions, main.per_position, strict=True):
            axes.annotate(f"{p:.2f}", (x, p), xytext=(0, 3), textcoords="offset points", ha="center")
        others = [arm for arm in drafted if arm is not main]
        for arm, style in zip(others, ("-", "--", ":", "-.") * len(others), strict=False):
            axes.plot(
                range(1, len(arm.per_position) + 1),
                arm.per_position,
                style,
                marker="o",
                ms=4,
                lw=1.2,
                color=BASE,
                label=_short(arm.name),
            )
        longest = max(len(arm.per_position) for arm in drafted)
        axes.set_xticks(range(1, longest + 1))
        axes.set_xlim(0.4, longest + 0.6)
        axes.set_ylim(0, 1.08)
        axes.grid(axis="y")
        axes.set_xlabel("i: draft position")
        axes.set_ylabel("p_i")
        _legend(axes, len(drafted))
    return out[0]


def k_curve_svg(view: View) -> str:
    """Line and band: predicted tokens per second over k; dots: measured; a dashed line at the baseline."""
    rows = view.k_curve
    if len(rows) < 3:
        return ""
    predicted = [row for row in rows if row.predicted is not None]
    measured = [row for row in rows if row.measured is not None]
    with _canvas("kcurve", 2.7) as (_, axes, out):
        ks = [row.k for row in predicted]
        axes.fill_between(
            ks, [row.low or 0 for row in predicted], [row.high or 0 for row in predicted], color=BASE, alpha=0.25, lw=0
        )
        axes.plot(ks, [row.predicted or 0.0 for row in predicted], color=BASE, lw=1.4, label="predicted")
        axes.plot(
            [row.k for row in measured], [row.measured or 0.0 for row in measured], "o", color=ACCENT, label="measured"
        )
        axes.axhline(rows[0].measured or 0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xticks([row.k for row in rows])
        axes.set_ylim(0, 1.1 * max(value for row in rows for value in (row.high, row.measured) if value))
        axes.grid(axis="y")
        axes.set_xlabel("k: tokens drafted a step (0: without speculation)")
        axes.set_ylabel("tok/s")
        _legend(axes, 2)
    return out[0]


def throughput_svg(view: View) -> str:
    """Lines: tokens per second against concurrency; baseline dashed, candidate strong, others faint."""
    arms = [arm for arm in view.arms if arm.throughput]
    if not arms:
        return ""
    ticks = sorted({c for arm in arms for c, _ in arm.throughput})
    order = {"other": 0, "baseline": 1, "candidate": 2}
    with _canvas("throughput", 2.7) as (_, axes, out):
        for arm in sorted(arms, key=lambda arm: order[arm.role]):
            x = [ticks.index(c) for c, _ in arm.throughput]
            axes.plot(x, [value for _, value in arm.throughput], label=_short(arm.name), **_line(arm))
        axes.set_xticks(range(len(ticks)), [str(c) for c in ticks])
        axes.set_xlim(-0.35, len(ticks) - 0.65)
        axes.set_ylim(0, 1.1 * max(value for arm in arms for _, value in arm.throughput) or 1.0)
        axes.grid(axis="y")
        axes.set_xlabel("concurrency")
        axes.set_ylabel("tok/s")
        _legend(axes, len(arms))
    return out[0]


def timeline_svg(view: View) -> str:
    """Gantt: one line a launch; pale while the server loads, solid while it is measured, hatched when it failed."""
    bars: Sequence[LaunchBar] = view.timeline
    if not bars:
        return ""
    roles = {arm.name: arm.role for arm in view.arms}
    colours = {"baseline": INK, "candidate": ACCENT, "other": BASE}
    whole = max(1.0, *(bar.start_s + bar.loading_s + bar.measuring_s for bar in bars))
    scale, unit = (60.0, "minutes") if whole > 180 else (1.0, "seconds")
    with _canvas("timeline", 0.8 + 0.26 * len(bars)) as (_, axes, out):
        for y, bar in enumerate(bars):
            colour = colours[roles.get(bar.arm, "other")]
            start, loading, measuring = bar.start_s / scale, bar.loading_s / scale, bar.measuring_s / scale
            # A launch that failed at once still has to be seen.
            loading = max(loading, 0.006 * whole / scale)
            if bar.status == "ok":
                axes.barh(y, loading, left=start, height=0.6, color=colour, alpha=0.3)
                axes.barh(y, measuring, left=start + loading, height=0.6, color=colour)
            else:
                axes.barh(y, loading + measuring, left=start, height=0.6, color="none", edgecolor=BAD, hatch="////")
        axes.set_yticks(range(len(bars)), [f"{_short(bar.arm)} #{bar.index}" for bar in bars])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.02 * whole / scale)
        axes.grid(axis="x")
        axes.set_xlabel(f"{unit} from the first launch")
        axes.spines["left"].set_visible(False)
    return out[0]


def _line(arm: ArmRow) -> dict[str, Any]:
    if arm.role == "baseline":
        return {"color": INK, "linestyle": (0, (5, 3)), "marker": "o", "ms": 4, "lw": 1.6}
    if arm.role == "candidate":
        return {"color": ACCENT, "marker": "o", "ms": 5, "lw": 2.4}
    return {"color": BASE, "marker": "o", "ms": 3, "lw": 1.0}


def _legend(axes: Axes, entries: int) -> None:
    """Below the plot, as text in a browser's font is wider or narrower than matplotlib expects."""
    if entries > 1:
        handles, labels = axes.get_legend_handles_labels()
        columns = 2 if entries > 3 else entries
        axes.figure.legend(
            handles[::-1], labels[::-1], loc="outside lower left", ncols=columns, fontsize=9, handlelength=2.2
        )


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_LABEL else f"{name[: _LONGEST_LABEL - 1]}…"


@contextmanager
def _canvas(name: str, height_in: float) -> Iterator[tuple[Figure, Axes, list[str]]]:
    """A figure of the page's column width; on leaving, the SVG is the one item of the yielded list."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({**_STYLE, "svg.hashsalt": f"surespec-{name}"}):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        FigureCanvasSVG(figure)
        out: list[str] = []
        yield figure, figure.subplots(), out
        buffer = io.StringIO()
        with warnings.catch_warnings():
            # The browser draws the text, so a letter missing from matplotlib's own font is no problem.
            warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    out.append(_inline(buffer.getvalue(), name))


def _inline(svg: str, name: str) -> str:
    """A stand-alone SVG made fit to stand inside a page: no prolog, no metadata, no page-wide style, own ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r"font-family: [^;\"]+", "font-family: inherit", svg)
    svg = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    for colour, variable in _CSS.items():
        svg = svg.replace(colour, variable)
    return re.sub(r"\n\s*", "\n", svg).strip()
