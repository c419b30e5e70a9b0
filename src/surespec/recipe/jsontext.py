"""Change keys of a JSON object in place, so that its spacing, order and variables stay."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surespec.recipe.text import Char, Edit, UnwritableError, replace_chars, text_of

_BLANK = re.compile(r"\s*")


@dataclass(frozen=True)
class Member:
    """One ``"key": value``; indices into the object's text."""

    key: str
    start: int
    value_start: int
    end: int
    value: Any


def members(text: str) -> list[Member]:
    """The members of a JSON object. Raises ValueError when it is none."""
    decoder = json.JSONDecoder()
    at = text.index("{") + 1
    out: list[Member] = []
    while True:
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return out
        start = at
        key, at = decoder.raw_decode(text, at)
        at = _skip(text, at)
        if text[at : at + 1] != ":" or not isinstance(key, str):
            raise ValueError("no JSON object")
        value_start = _skip(text, at + 1)
        value, at = decoder.raw_decode(text, value_start)
        out.append(Member(key, start, value_start, at, value))
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at += 1
        elif text[at : at + 1] != "}":
            raise ValueError("no JSON object")


def _skip(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def change_keys(chars: Sequence[Char], wanted: Mapping[str, Any]) -> list[Edit]:
    """Edits that make the object ``wanted``: changed values in place, missing keys at the end, others removed.

    Raises UnwritableError where a place cannot be written, ValueError when the text is no JSON object.
    """
    text = text_of(chars)
    found = members(text)
    if not found or len({m.key for m in found}) < len(found):
        raise UnwritableError("it is empty or names a key twice")
    edits: list[Edit] = []
    kept = [m for m in found if m.key in wanted]
    if not kept:
        raise UnwritableError("nothing of it stays")
    for i, member in enumerate(found):
        if member.key not in wanted:
            edits.append(_drop(chars, found, i, wanted))
        elif not same(member.value, wanted[member.key]):
            edits.append(_change(chars, member, wanted[member.key]))
    added = [k for k in wanted if k not in {m.key for m in found}]
    if added:
        edits.append(_append(chars, text, found, {k: wanted[k] for k in added}))
    return edits


def compact(value: Any) -> str:
    """JSON without blanks; characters that do not print are escaped."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value, separators=(",", ":"))


def _spaced(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


def same(left: Any, right: Any) -> bool:
    """Equal as JSON: true is not 1, 5 is not 5.0 spelled otherwise."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def _change(chars: Sequence[Char], member: Member, value: Any) -> Edit:
    start, end = member.value_start, member.end
    spelled = compact(value)
    if isinstance(member.value, str) and isinstance(value, str) and member.value:
        return replace_chars(chars[start + 1 : end - 1], spelled[1:-1])
    return replace_chars(chars[start:end], spelled)


def _drop(chars: Sequence[Char], found: Sequence[Member], i: int, wanted: Mapping[str, Any]) -> Edit:
    """Remove a member with one comma: the one before it, or after it while none before it stays."""
    front = all(m.key not in wanted for m in found[:i])
    start, end = (found[i].start, found[i + 1].start) if front else (found[i - 1].end, found[i].end)
    _one_stretch(chars[start:end])
    return Edit(chars[start].start, chars[end - 1].end, "")


def _one_stretch(chars: Sequence[Char]) -> None:
    for left, right in itertools.pairwise(chars):
        if left.end > right.start or right.start - left.end > 8:
            raise UnwritableError("it is put together from several pieces")


def _append(chars: Sequence[Char], text: str, found: Sequence[Member], added: Mapping[str, Any]) -> Edit:
    """New members before the closing brace, spaced as the others are."""
    close = _skip(text, found[-1].end)
    last = found[-1]
    comma = text[found[-2].end : last.start] if len(found) > 1 else ", " if " " in text[last.start : last.end] else ","
    colon = ": " if text[last.value_start - 1] == " " else ":"
    spelled = "".join(f"{comma}{json.dumps(k)}{colon}{_spaced(v)}" for k, v in added.items())
    at = chars[close]
    tail = chars[close - 1] if text[close - 1].isspace() else at
    place = tail.start if tail is not at and tail.ctx == at.ctx else at.start
    return Edit(place, place, at.ctx.encode(spelled))
