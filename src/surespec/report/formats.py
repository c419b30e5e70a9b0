"""How numbers are written, the same on the terminal and on the page. None is a dash."""

from __future__ import annotations

DASH = "–"


def quantity(value: float | None, unit: str) -> str:
    """Three significant digits and the unit: 7.25 ms, 51.3 tok/s, 1240 tok/s."""
    if value is None:
        return DASH
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"


def ratio(value: float | None) -> str:
    """A factor with two decimals: 1.42×."""
    return DASH if value is None else f"{value:.2f}×"


def plain(value: float | None) -> str:
    """A bare number with two decimals."""
    return DASH if value is None else f"{value:.2f}"


def interval(low: float | None, high: float | None) -> str:
    """Both ends of an interval of a ratio: 1.35 to 1.49."""
    return DASH if low is None or high is None else f"{low:.2f} to {high:.2f}"
