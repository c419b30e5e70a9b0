"""Entries of YAML lists: write one, put some in, take one out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set

from surespec.recipe.arguments import Home
from surespec.recipe.text import Edit, Source, UnwritableError

_PLAIN = re.compile(r"-{1,2}[A-Za-z][\w.=/+-]*$|[A-Za-z/][\w./+-]*$")
_RESERVED = re.compile(r"(?i)(true|false|yes|no|on|off|null|none|y|n)$")


def item_text(value: str, home: Home) -> str:
    """``value`` as one list entry, always read back as this very text.

    JSON goes in single quotes, plain words stay plain unless the list's other entries are quoted. ``home.ctx`` is
    what doubles the ``$`` (compose, Kubernetes).
    """
    spelled = home.ctx.encode(value)
    if not spelled.isprintable():
        raise UnwritableError("it holds control characters")
    if "json" in home.quotes:
        return json.dumps(spelled, ensure_ascii=False)
    if "'" in spelled and '"' not in spelled:
        return '"' + spelled.replace("\\", "\\\\") + '"'
    quote = "'" if '"' in spelled else _usual_quote(home)
    if quote == '"':
        return '"' + spelled.replace("\\", "\\\\") + '"'
    if quote == "" and _PLAIN.match(spelled) and not _RESERVED.match(spelled):
        return spelled
    return "'" + spelled.replace("'", "''") + "'"


def _usual_quote(home: Home) -> str:
    return max(("", "'", '"'), key=home.quotes.count) if home.quotes else "'"


def insert_items(entries: Sequence[str], anchor: tuple[int, int], home: Home, source: Source) -> Edit:
    """Put entries after the one at ``anchor``: own lines with its indent in a block list, after commas in ``[...]``."""
    text = source.text
    index = home.items.index(anchor)
    if home.kind == "flow":
        gap = ", "
        if index > 0:
            before = text[home.items[index - 1][1] : anchor[0]]
            broken = re.fullmatch(r"\s*,\s*", before)
            gap = before.lstrip() if broken else gap
        return Edit(anchor[1], anchor[1], "".join(gap + e for e in entries))
    start = text.rfind("\n", 0, anchor[0]) + 1
    lead = re.fullmatch(r"([ \t]*)-([ \t]+)", text[start : anchor[0]])
    if lead is None:
        raise UnwritableError("the list begins on the line of something else")
    line_end = text.find("\n", anchor[1])
    if line_end < 0:
        return Edit(len(text), len(text), "".join(f"{source.newline}{lead[0]}{e}" for e in entries))
    at = line_end + 1
    return Edit(at, at, "".join(f"{lead[0]}{e}{source.newline}" for e in entries))


def remove_item(span: tuple[int, int], home: Home, text: str, leaving: Set[tuple[int, int]]) -> Edit:
    """Take an entry out: its lines of a block list, itself and a comma of ``[...]``."""
    index = home.items.index(span)
    if home.kind == "flow":
        staying = [i for i, s in enumerate(home.items) if s not in leaving]
        before = [i for i in staying if i < index]
        if before:
            return Edit(home.items[index - 1][1], span[1], "")
        if index + 1 < len(home.items):
            return Edit(span[0], home.items[index + 1][0], "")
        raise UnwritableError("the list would be empty")
    if len(leaving) >= len(home.items):
        raise UnwritableError("the list would be empty")
    start = text.rfind("\n", 0, span[0]) + 1
    if not re.fullmatch(r"[ \t]*-[ \t]+", text[start : span[0]]):
        raise UnwritableError("the list begins on the line of something else")
    end = span[1]
    line_end = text.find("\n", end)
    tail = all(s in leaving for s in home.items[index:])
    if tail and text.find("\n", home.items[-1][1]) < 0:  # the file ends here without a line end: take those before
        stop = len(text) if line_end < 0 else line_end - text[:line_end].endswith("\r")
        return Edit(start - 1 - text[: start - 1].endswith("\r"), stop, "")
    return Edit(start, line_end + 1, "")
