"""Knowledge as data: one TOML file a topic, each entry with its source. This module only reads them."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from surespec.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from surespec.core import Policy


@dataclass(frozen=True)
class Rule:
    """What holds, why, and where it is said. ``contradiction`` holds the other view where the sources disagree."""

    name: str
    rule: str
    why: str
    source: str
    contradiction: str = ""


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


@cache
def rules() -> dict[str, Rule]:
    """All rules by name, in the order of the file."""
    return {name: Rule(name=name, **entry) for name, entry in load_topic("rules").items()}


def explain(name: str) -> Rule:
    """The rule of that name, in any case. Raises UsageError with the nearest names."""
    table = rules()
    if name.upper() in table:
        return table[name.upper()]
    near = difflib.get_close_matches(name.upper(), table, n=3) or list(table)
    raise UsageError(f"explain {name}: there is no such rule.", hint=f"Known: {', '.join(near)}.")


__all__ = ["Rule", "explain", "load_topic", "policy", "rules"]
