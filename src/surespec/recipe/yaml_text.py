"""YAML scalars as characters that know their place, and how to spell more of them in the same style.

Structure comes from ruamel.yaml's nodes and their marks; only the text of a scalar is decoded here, because no YAML
library says where in the file each decoded character stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from surespec.recipe.text import FILE, Char, Chars, Context, Source, UnwritableError, text_of

_ESCAPES = {
    "0": "\0",
    "a": "\a",
    "b": "\b",
    "t": "\t",
    "n": "\n",
    "v": "\v",
    "f": "\f",
    "r": "\r",
    "e": "\x1b",
    " ": " ",
}
_FOLD = re.compile(r"[ \t]*(?:\r?\n[ \t]*)+")
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)+")  # an anchor, a tag
_UNSAFE_PLAIN = re.compile(r"[\n\r\t]|: |:$| #|^\s|\s$")
MAX_DEPTH = 200  # brackets within brackets


@dataclass(frozen=True)
class YamlStyle(Context):
    """Inside a scalar: plain, single, double or block (``|`` and ``>``); ``flow`` when inside ``[...]``."""

    style: str
    flow: bool = False
    parent: Context | None = FILE

    def own(self, text: str) -> str:
        if self.style == "single":
            spelled = text.replace("'", "''")
        elif self.style == "double":
            spelled = text.replace("\\", "\\\\").replace('"', '\\"')
        else:
            spelled = text
            bad = re.search(r"[\n\r]", text) if self.style == "block" else _UNSAFE_PLAIN.search(text)
            if bad or (self.style == "plain" and self.flow and re.search(r"[\[\]{},]", text)):
                raise UnwritableError("an unquoted YAML text cannot hold it")
        if not spelled.isprintable():
            raise UnwritableError("it holds control characters")
        return spelled


def load_nodes(source: Source) -> list[Node]:
    """The documents of a YAML file as nodes with marks. Raises InputFileError with the line."""
    text = source.text
    depth = 0
    for bracket in re.finditer(r"[\[\]{}]", text):  # the parser takes seconds for what it refuses in the end
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_DEPTH:
            raise source.error(bracket.start(), "this file is nested too deeply to be a recipe.", "Name another file.")
    try:
        return [n for n in YAML(typ="rt", pure=True).compose_all(text) if n is not None]
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        offset = len("".join(text.splitlines(keepends=True)[: line - 1]))
        what = " ".join(str(error.problem or error.context or "it is no YAML").split())
        raise source.error(offset, f"no valid YAML: {what}.", "Mend the file, then run surespec again.") from error
    except (YAMLError, RecursionError, ValueError) as error:
        what = " ".join(str(error).split())[:200]
        raise source.error(0, f"no valid YAML: {what}.", "Mend the file, then run surespec again.") from error


def span(node: Node) -> tuple[int, int]:
    """The node's place in the file."""
    return node.start_mark.index, node.end_mark.index


def entry(node: Node | None, *path: str) -> Node | None:
    """The node at a path of keys; merged mappings (``<<``) count, own keys first."""
    for key in path:
        if not isinstance(node, MappingNode):
            return None
        node = next((value for name, value in pairs(node) if name == key), None)
    return node


def pairs(node: Node | None, seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Node]]:
    """Keys and values of a mapping, its own before those it merges in."""
    if not isinstance(node, MappingNode) or id(node) in seen or len(seen) > 20:
        return
    merged: list[Node] = []
    for key, value in node.value:
        if key.value == "<<" and key.style is None:
            merged += value.value if isinstance(value, SequenceNode) else [value]
        else:
            yield str(key.value), value
    for other in {id(m): m for m in merged}.values():
        yield from pairs(other, seen | {id(node)})


def scalar(node: Node | None) -> str:
    """The text of a scalar node, "" for anything else."""
    return str(node.value).replace("\a", "") if isinstance(node, ScalarNode) else ""


def chars_of(node: ScalarNode, source: Source, *, flow: bool = False) -> Chars:
    """The scalar's characters. Raises InputFileError for a text that could not be mapped."""
    start, end = span(node)
    text, style = source.text, node.style
    properties = _PROPERTIES.match(text, start, end)
    start = properties.end() if properties else start
    if style in ("|", ">"):
        chars = _block(text, start, end, folded=style == ">")
    elif style == '"':
        chars = _double(text, start + 1, end - 1)
    else:
        name = "single" if style == "'" else "plain"
        inner = (start + 1, end - 1) if style == "'" else (start, end)
        chars = _flowing(text, *inner, YamlStyle(name, flow))
    if text_of(chars).rstrip("\n") != scalar(node).rstrip("\n"):
        raise source.error(start, "surespec cannot follow the spelling of this YAML text.", "Write it in quotes.")
    return chars


def _flowing(text: str, start: int, end: int, ctx: YamlStyle) -> Chars:
    """Plain and single-quoted scalars: line breaks fold, ``''`` is one quote."""
    out: Chars = []
    at = start
    while at < end:
        fold = _FOLD.match(text, at, end)
        if fold and "\n" in fold[0]:
            out += _folded(fold, ctx)
            at = fold.end()
        elif ctx.style == "single" and text.startswith("''", at):
            out.append(Char("'", at, at + 2, ctx))
            at += 2
        else:
            out.append(Char(text[at], at, at + 1, ctx))
            at += 1
    return out


def _folded(fold: re.Match[str], ctx: Context) -> Chars:
    breaks = fold[0].count("\n")
    if breaks == 1:
        return [Char(" ", fold.start(), fold.end(), ctx)]
    last = Char("\n", fold.start(), fold.end(), ctx)
    return [Char("\n", fold.start(), fold.start(), ctx)] * (breaks - 2) + [last]


def _double(text: str, start: int, end: int) -> Chars:
    out: Chars = []
    ctx = YamlStyle("double")
    at = start
    while at < end:
        fold = _FOLD.match(text, at, end)
        if fold and "\n" in fold[0]:
            out += _folded(fold, ctx)
            at = fold.end()
            continue
        if text[at] != "\\":
            out.append(Char(text[at], at, at + 1, ctx))
            at += 1
            continue
        joined = re.compile(r"\\\r?\n[ \t]*").match(text, at, end)
        if joined:
            at = joined.end()
            continue
        width = {"x": 2, "u": 4, "U": 8}.get(text[at + 1 : at + 2], 0)
        letter = text[at + 1 : at + 2]
        value = chr(int(text[at + 2 : at + 2 + width], 16)) if width else _ESCAPES.get(letter, letter)
        out.append(Char(value, at, at + 2 + width, ctx))
        at += 2 + width
    return out


def _block(text: str, start: int, end: int, *, folded: bool) -> Chars:
    """Literal and folded scalars; trailing line ends are left to the style's chomping and not decoded."""
    ctx = YamlStyle("block")
    at = text.find("\n", start, end) + 1
    header = text[start:at]
    lines: list[tuple[int, str]] = []
    while 0 < at < end:
        line_end = text.find("\n", at, end)
        line_end = end if line_end < 0 else line_end
        lines.append((at, text[at:line_end].removesuffix("\r")))
        at = line_end + 1
    while lines and not lines[-1][1].strip():
        lines.pop()
    if not lines:
        return []
    explicit = re.match(r"[|>][+-]?(\d)", header)
    first = next(line for _, line in lines if line.strip())
    indent = len(first) - len(first.lstrip(" "))
    if explicit:
        before = text[text.rfind("\n", 0, start) + 1 : start]
        indent = len(before) - len(before.lstrip(" ")) + int(explicit[1])
    return _block_chars(lines, indent, ctx, folded)


def _block_chars(lines: list[tuple[int, str]], indent: int, ctx: Context, folded: bool) -> Chars:
    out: Chars = []
    bodies = [line[indent:] for _, line in lines]
    for i, ((at, line), body) in enumerate(zip(lines, bodies, strict=True)):
        out += [Char(c, at + indent + j, at + indent + j + 1, ctx) for j, c in enumerate(body)]
        if i + 1 == len(lines):
            break
        stop = lines[i + 1][0]
        begin = at + len(line) if line[indent:] else at
        after = stop + (indent if bodies[i + 1] else 0)
        following = next((b for b in bodies[i + 1 :] if b), "")
        previous = next((b for b in reversed(bodies[: i + 1]) if b), "")
        inner = folded and not previous.startswith((" ", "\t")) and not following.startswith((" ", "\t")) and previous
        if inner and body:
            out.append(Char(" " if bodies[i + 1] else "\0", begin, after, ctx))
        else:
            out.append(Char("\n", begin, after, ctx))
    return [c for c in out if c.c != "\0"]
