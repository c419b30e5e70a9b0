"""Release numbers compared. Only the release counts: ``0.8.5.post1`` is 0.8.5, ``v0.31.0-ubuntu2404`` is 0.31.0."""

from __future__ import annotations

import re

_RELEASE = re.compile(r"^\s*v?(\d+(?:\.\d+){0,4})")


def release(text: str) -> tuple[int, ...]:
    """The release number of a version as integers; empty when there is none (``latest``, an empty text)."""
    found = _RELEASE.match(text)
    if found is None or any(len(part) > 9 for part in found[1].split(".")):
        return ()
    return tuple(int(part) for part in found[1].split("."))


def _padded(text: str) -> tuple[int, ...]:
    numbers = release(text)
    return numbers + (0,) * (5 - len(numbers))


def at_least(version: str, floor: str) -> bool:
    """True when ``version`` is ``floor`` or newer; an empty floor is always reached, an unknown version never."""
    if not release(floor):
        return True
    return bool(release(version)) and _padded(version) >= _padded(floor)


def at_most(version: str, ceiling: str) -> bool:
    """True when ``version`` is not newer than ``ceiling``, to the ceiling's own precision (0.16 covers 0.16.2)."""
    limit, numbers = release(ceiling), release(version)
    if not limit:
        return True
    return bool(numbers) and _padded(version)[: len(limit)] <= limit
