"""How systemd spells one word of ExecStart=: quotes, C-like escapes, ``%%`` and ``$$`` (systemd.service(5))."""

from __future__ import annotations

import re

from surespec.recipe.text import UnwritableError

_SAFE = re.compile(r"[\w@+=:,./-]+$", re.A)


def quote_unit(value: str) -> str:
    """One word for ExecStart=. Raises UnwritableError for control characters."""
    if not value.isprintable():
        raise UnwritableError("it holds control characters")
    spelled = value.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    if value and _SAFE.match(value):
        return spelled
    return "'" + spelled.replace("'", "\\'") + "'"
