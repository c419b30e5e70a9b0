"""Knowledge as data: one TOML file a topic, each entry with its source. This module only reads them."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from surespec.errors import ConfigError

if TYPE_CHECKING:
    from surespec.core import Policy


@cache
def load_topic(name: str) -> dict[str, Any]:
    """The parsed TOML of one topic (``policies``, ``devices`` ...). Raises KeyError for a topic that does not exist."""
    source = resources.files(__name__) / f"{name}.toml"
    if not source.is_file():
        raise KeyError(name)
    return tomllib.loads(source.read_text(encoding="utf-8"))


def policy(name: str) -> Policy:
    """The policy of that name. Raises ConfigError with the known names."""
    from surespec.core import Policy

    table = load_topic("policies")
    if name not in table:
        raise ConfigError(f"--policy {name}: there is no such policy.", hint=f"Known: {', '.join(sorted(table))}.")
    return Policy(name=name, **table[name])
