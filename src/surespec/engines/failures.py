"""What a failed launch means and what to try next. Pure: lines of a log in, a ``Failure`` out; the knowledge is data.

``rules/failures.toml`` holds the signs (a pattern, a kind, a sentence), the kinds and the remedies. ``classify`` finds
the first sign that the log shows; ``next_remedy`` walks the remedies of its kind. Every remedy has a number of times an
arm may have it and names the remedies that would take it back, so whatever fails after whatever, it comes to an end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import Field

from surespec.core import Noun
from surespec.engines.log_tail import clean, last_meaningful, redact
from surespec.rules import load_topic

Moment = Literal["start", "first_request", "load"]
"""When it failed: before it answered, at the first real request, or while it was being measured."""

By = Literal["surespec", "person"]
EVIDENCE_CHARS = 400
_HEADROOM = 0.01
_KILLED, _KILLED_EXIT = 9, 137
_CRASH: dict[Moment, str] = {"start": "unknown", "first_request": "crash_first_request", "load": "crash_under_load"}
_ALIVE: dict[Moment, str] = {"start": "hang", "first_request": "unknown", "load": "hang"}


class Remedy(Noun):
    """One thing to try. ``by`` surespec: change the command and launch again; by person: say it, then stop.

    ``arguments`` says how: ``to`` (a value), or ``step``/``factor`` with ``limit`` (applied to the value in use), or
    ``field`` (the flag or key to leave out). ``source``: rules (``surespec explain NAME``) or where it is said.
    """

    name: str
    say: str
    by: By
    times: int = 1
    excludes: tuple[str, ...] = ()
    arguments: dict[str, int | float | str] = Field(default_factory=dict)
    source: str

    def changed(self, value: float) -> float | None:
        """The value in use, changed as this remedy says; None when it is at its limit or the remedy changes none.

        ``to`` is only taken when it goes the remedy's way (a wanted context longer than the present one helps nobody).
        """
        step, factor = self.arguments.get("step"), self.arguments.get("factor")
        limit, target = self.arguments.get("limit"), self.arguments.get("to")
        if isinstance(step, float | int):
            wanted, down = value + step, step < 0
        elif isinstance(factor, float | int):
            wanted, down = (math.floor if factor < 1 else math.ceil)(value * factor), factor < 1
        else:
            return None
        if isinstance(target, float | int) and (target < value if down else target > value):
            wanted = target
        if isinstance(limit, float | int):
            wanted = max(wanted, limit) if down else min(wanted, limit)
        wanted = round(wanted, 4)
        return wanted if (wanted < value if down else wanted > value) else None


class Failure(Noun):
    """Why a launch failed. ``sentence`` is for a person, ``evidence`` the log's own words (redacted, may be empty)."""

    kind: str
    sentence: str
    evidence: str = ""
    engine: str
    moment: Moment
    remedies: tuple[Remedy, ...]
    source: str = ""


@dataclass(frozen=True, slots=True)
class _Sign:
    """A pattern of the table, compiled."""

    kind: str
    pattern: re.Pattern[str]
    engines: tuple[str, ...]
    moments: tuple[str, ...]
    what: str
    remedies: tuple[str, ...]
    source: str

    def applies(self, engine: str, moment: Moment) -> bool:
        """Whether it is looked for at all."""
        return (not self.engines or engine in self.engines) and (not self.moments or moment in self.moments)


def classify(
    engine: str, moment: Moment, exit_code: int | None, signal: int | None, log_lines: Sequence[str]
) -> Failure:
    """The failure that a log and an ending show.

    ``exit_code`` None: the server still runs (it hangs, or refuses the request); ``signal``: the number of the signal
    that ended it, if one did. ``log_lines`` are taken as they come; a few thousand from the end are enough.
    """
    text = "\n".join(clean(line) for line in log_lines)
    for sign in _signs():
        if not sign.applies(engine, moment):
            continue
        found = sign.pattern.search(text)
        if found is None:
            continue
        groups = {name.rstrip("2"): value.strip() for name, value in found.groupdict().items() if value}
        sentence = _sentence(sign, groups)
        return _failure(
            sign.kind, engine, moment, groups, sentence=sentence, remedies=sign.remedies,
            evidence=groups.get("said") or " ".join(found.group(0).split()), source=sign.source,
        )  # fmt: skip
    evidence = last_meaningful(text.splitlines(), EVIDENCE_CHARS)
    if signal == _KILLED or exit_code in (_KILLED_EXIT, -_KILLED):
        return _failure("host_oom", engine, moment, {}, evidence=evidence)
    kind = (_ALIVE if exit_code is None and signal is None else _CRASH)[moment]
    return _failure(kind, engine, moment, {}, evidence=evidence)


def next_remedy(failure: Failure, tried: Sequence[str]) -> Remedy | None:
    """The first remedy surespec itself can still try; None when only a person can go on.

    ``tried`` names the remedies this arm has had, in any order, for whatever failure: a name counts as often as it
    stands there, and what one of them excludes is not offered.
    """
    return next((remedy for remedy in remaining(failure, tried) if remedy.by == "surespec"), None)


def remaining(failure: Failure, tried: Sequence[str]) -> tuple[Remedy, ...]:
    """All that is left to try, by surespec or a person, in order."""
    known = _remedies()
    excluded = {name for done in tried if done in known for name in known[done].excludes}
    return tuple(
        remedy for remedy in failure.remedies if remedy.name not in excluded and tried.count(remedy.name) < remedy.times
    )


def kinds() -> tuple[str, ...]:
    """All kinds, in the order of the table."""
    return tuple(load_topic("failures")["kind"])


def _failure(
    kind: str,
    engine: str,
    moment: Moment,
    groups: Mapping[str, str],
    *,
    sentence: str = "",
    evidence: str = "",
    remedies: Sequence[str] = (),
    source: str = "",
) -> Failure:
    entry = load_topic("failures")["kind"][kind]
    known = _remedies()
    return Failure(
        kind=kind,
        sentence=redact(sentence or entry["what"]),
        evidence=redact(evidence)[:EVIDENCE_CHARS],
        engine=engine,
        moment=moment,
        remedies=tuple(_with_values(known[name], groups) for name in remedies or entry["remedies"]),
        source=source or entry["source"],
    )


def _sentence(sign: _Sign, groups: Mapping[str, str]) -> str:
    """The sign's sentence with what was found; the kind's where a part of it was not found."""
    try:
        said = sign.what.format_map(groups)
    except KeyError:
        return ""
    return said if not said or said.endswith((".", "!", "?")) else f"{said}."


def _with_values(remedy: Remedy, groups: Mapping[str, str]) -> Remedy:
    """The remedy with the value the log names: the share of memory that is free, the context that fits, the field."""
    values: dict[str, int | float | str] = {}
    if remedy.name == "lower_utilization" and {"free", "total"} <= groups.keys():
        share = float(groups["free"]) / max(float(groups["total"]), 1e-9)
        values["to"] = math.floor((share - _HEADROOM) * 100) / 100
    if remedy.name == "shorter_context" and "fits" in groups:
        values["to"] = int(groups["fits"])
    if remedy.name == "drop_field" and "field" in groups:
        values["field"] = groups["field"]
    return remedy.model_copy(update={"arguments": {**remedy.arguments, **values}}) if values else remedy


@cache
def _remedies() -> dict[str, Remedy]:
    """The remedies of the table by name."""
    found = {}
    for name, entry in load_topic("failures")["remedy"].items():
        amounts = {key: entry[key] for key in ("step", "factor", "limit") if key in entry}
        found[name] = Remedy(
            name=name, say=entry["say"], by=entry["by"], times=entry.get("times", 1),
            excludes=tuple(entry.get("excludes", ())), arguments=amounts, source=entry["source"],
        )  # fmt: skip
    return found


@cache
def _signs() -> tuple[_Sign, ...]:
    """The signs of the table in its order."""
    entries: list[dict[str, Any]] = load_topic("failures")["sign"]
    return tuple(
        _Sign(
            kind=entry["kind"],
            pattern=re.compile(entry["regex"], re.MULTILINE),
            engines=tuple(entry.get("engines", ())),
            moments=tuple(entry.get("moments", ())),
            what=entry.get("what", ""),
            remedies=tuple(entry.get("remedies", ())),
            source=entry["source"],
        )
        for entry in entries
    )
