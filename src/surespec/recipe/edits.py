"""Changes of an argument list as edits of the file: add, remove, replace. Everything around stays as it is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence, Set

from surespec.recipe.arguments import Arg, Home
from surespec.recipe.flags import Flag, is_flag, takes_value
from surespec.recipe.text import Char, Edit, Source, UnwritableError, replace_chars
from surespec.recipe.unit_words import quote_unit
from surespec.recipe.yaml_lists import insert_items, item_text, remove_item

_CODE = ("shell", "array", "split", "unit")


def quoted(value: str, home: Home) -> str:
    """``value`` as one entry of this list, in the file's spelling. Raises UnwritableError."""
    if home.kind in ("shell", "array"):
        return home.ctx.encode(shlex.quote(value))
    if home.kind == "unit":
        return home.ctx.encode(quote_unit(value))
    if home.kind == "split":
        return home.ctx.encode(value)
    return item_text(value, home)


def replace_value(flag: Flag, new: str, mode: str, source: Source) -> list[Edit]:
    """Give a flag another value. ``mode`` chars: where its characters stand (perhaps a variable's default); word: the
    argument itself is written anew.
    """
    if flag.inline is None and not flag.values:
        raise UnwritableError(f"{flag.name} stands there without its value")
    holder = flag.arg if flag.inline is not None else flag.values[0]
    if holder.home.locked:
        raise UnwritableError(holder.home.locked)
    value = flag.inline if flag.inline is not None else holder.chars
    if mode == "chars":
        if holder.shared or holder.unknown:
            raise UnwritableError("it comes from a variable that is used elsewhere, or that has no default")
        if not value:
            raise UnwritableError("it is empty")
        return [replace_chars(value, new)]
    if holder.home.kind == "split":
        raise UnwritableError("the shell splits the variable it stands in")
    prefix = flag.arg.text.partition("=")[0] + "=" if flag.inline is not None else ""
    text = quoted(prefix + new, holder.home)
    if prefix and holder.home.kind in ("shell", "array"):
        text = source.text[holder.span[0] : holder.span[0] + len(prefix)] + quoted(new, holder.home)
        if not source.text.startswith(prefix, holder.span[0]):
            text = quoted(prefix + new, holder.home)
    return [Edit(*holder.span, text)]


def remove_args(args: Sequence[Arg], source: Source) -> list[Edit]:
    """Take arguments out of their lists, with the blanks (or the line) that led to each."""
    spans: dict[tuple[int, int], Home] = {}
    for arg in args:
        if arg.home.locked:
            raise UnwritableError(arg.home.locked)
        if arg.span not in arg.home.items:
            raise UnwritableError("it does not stand in this list itself")
        spans[arg.span] = arg.home
    edits = []
    for span, home in spans.items():
        if home.kind in _CODE:
            edits.append(_remove_word(span, home, source.text, set(spans)))
        else:
            edits.append(remove_item(span, home, source.text, {s for s, h in spans.items() if h is home}))
    return edits


def _remove_word(span: tuple[int, int], home: Home, text: str, leaving: Set[tuple[int, int]]) -> Edit:
    index = home.items.index(span)
    if all(s in leaving for s in home.items[:index]):  # the front of the list: what follows moves up
        end = home.items[index + 1][0] if index + 1 < len(home.items) else span[1]
        return Edit(span[0], end, "")
    start = home.items[index - 1][1]
    gap = text[start : span[0]]
    if "#" in gap:  # a comment in an array stays
        start += gap.rindex("\n")
        start -= gap[: start - home.items[index - 1][1]].endswith("\r")
    return Edit(start, span[1], "")


def add_flags(args: Sequence[Arg], flags: Sequence[tuple[str, str | None]], source: Source) -> list[Edit]:
    """Write flags after the last of an engine's arguments, in the manner of the others. Raises UnwritableError."""
    home, anchor = _anchor(args)
    joined = _joins(args, home)
    words: list[list[str]] = []
    for name, value in flags:
        if value is None:
            words.append([quoted(name, home)])
        elif joined:
            words.append([_with_equals(name, value, home)])
        else:
            words.append([quoted(name, home), quoted(value, home)])
    if home.kind in ("block", "flow"):
        return [insert_items([w for group in words for w in group], anchor, home, source)]
    separator = _separator(args, home, anchor, source.text)
    return [Edit(anchor[1], anchor[1], "".join(separator + " ".join(group) for group in words))]


def _with_equals(name: str, value: str, home: Home) -> str:
    if home.kind in ("shell", "array"):
        return home.ctx.encode(f"{name}={shlex.quote(value)}")
    return quoted(f"{name}={value}", home)


def _anchor(args: Sequence[Arg]) -> tuple[Home, tuple[int, int]]:
    """Where new flags go: after the last argument written out, before what is passed on from outside."""
    unsure = any(not arg.conditional for arg in args)  # else the whole command stands under a condition
    for arg in reversed(args):
        if arg.home.kind == "split" or (arg.conditional and unsure) or arg.span not in arg.home.items:
            continue
        if arg.home.locked:
            raise UnwritableError(arg.home.locked)
        following = arg.home.items[arg.home.items.index(arg.span) + 1 :]
        if following and is_flag(arg.text) and "=" not in arg.text and takes_value(arg.text):
            return arg.home, following[0]  # a value that only running would tell
        return arg.home, arg.span
    raise UnwritableError("the arguments are not written in this file")


def _joins(args: Sequence[Arg], home: Home) -> bool:
    """Whether most flags of this list are written ``--flag=value``."""
    own = [a.text for a in args if a.home is home and is_flag(a.text)]
    with_equals = sum("=" in text for text in own)
    return with_equals * 2 > len(own)


def _separator(args: Sequence[Arg], home: Home, anchor: tuple[int, int], text: str) -> str:
    """What stands before the list's flags: a blank, or the line break and indent of the last flag on its own line."""
    items = home.items
    flags = {a.span for a in args if a.home is home and is_flag(a.text)}
    for index in range(items.index(anchor), 0, -1):
        gap = text[items[index - 1][1] : items[index][0]]
        if items[index] in flags and "\n" in gap:
            first = re.match(r"[^\r\n]*", gap)
            last_line = re.search(r"\r?\n[ \t]*$", gap)
            head = first[0].partition("#")[0].rstrip() if first and "#" in first[0] else first[0] if first else ""
            return head + (last_line[0] if last_line else " ")
    if home.kind == "array" and items:
        before = re.search(r"\r?\n[ \t]*$", text[: items[0][0]])
        if before:
            return before[0]
    return " "


def value_chars(flag: Flag) -> Sequence[Char]:
    """The characters of a flag's value."""
    if flag.inline is not None:
        return flag.inline
    return flag.values[0].chars if flag.values else ()
