"""Text that remembers where it stands in the file, through every layer of quoting.

A recipe is text in text: JSON in a shell word in a YAML scalar in a file. Each layer is decoded into ``Char``s: the
character a program finally sees, the span of the file that spells it, and the context that says how to spell another
one there. So every reader works on plain values, and a change of a value is one edit of the file.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from surespec.errors import InputFileError


class UnwritableError(ValueError):
    """This text cannot be written at this place as the file stands; the message says why."""


class Context:
    """How a value is spelled at one place. The base class is the bare file: a character spells itself."""

    parent: Context | None = None

    def own(self, text: str) -> str:
        """``text`` in this layer's spelling."""
        return text

    def encode(self, text: str) -> str:
        """``text`` in the file's spelling, through all layers. Raises UnwritableError."""
        spelled = self.own(text)
        return self.parent.encode(spelled) if self.parent is not None else spelled


FILE = Context()


class Opaque(Context):
    """A place whose value only running the recipe would tell (a variable without default, ``$(...)``)."""

    def own(self, text: str) -> str:
        raise UnwritableError("its value is only known when it runs")


OPAQUE = Opaque()


@dataclass(frozen=True)
class ShellQuote(Context):
    """Inside a shell word. ``style``: bare, single, double or ansi (``$'...'``)."""

    style: str
    parent: Context | None = FILE

    def own(self, text: str) -> str:
        if self.style == "bare":
            return shlex.quote(text) if text else ""
        if self.style == "single":
            return text.replace("'", "'\\''")
        if self.style == "double":
            return re.sub(r'([\\"$`])', r"\\\1", text)
        if not text.isprintable():
            raise UnwritableError("it holds control characters")
        return text.replace("\\", "\\\\").replace("'", "\\'")


@dataclass(frozen=True)
class SplitValue(Context):
    """Inside a variable that the shell splits into words (``$ARGS``): no quoting helps, so no blanks."""

    parent: Context | None = FILE

    def own(self, text: str) -> str:
        if not text or re.search(r"[\s*?'\\]", text):
            raise UnwritableError("the shell splits this variable at blanks")
        return text


@dataclass(frozen=True)
class Doubled(Context):
    """A layer in which one character is written twice to stand for itself (compose and Kubernetes: ``$``)."""

    char: str
    parent: Context | None = FILE

    def own(self, text: str) -> str:
        return text.replace(self.char, self.char * 2)


class Char(NamedTuple):
    """One character of a value, the span of the file that spells it, and how its neighbours are spelled."""

    c: str
    start: int
    end: int
    ctx: Context


Chars = list[Char]


def text_of(chars: Iterable[Char]) -> str:
    """The value."""
    return "".join(char.c for char in chars)


@dataclass(frozen=True)
class Source:
    """A recipe's file: its name for messages, and its text with the bytes it had (undecodable ones kept)."""

    name: str
    text: str

    @classmethod
    def decode(cls, name: str, data: bytes) -> Source:
        """Bytes of a file. Raises InputFileError for what is no text."""
        if b"\0" in data:
            raise InputFileError(f"{name} is no text file.", hint="A recipe is the text that starts the deployment.")
        if len(data) > 1 << 18:
            raise InputFileError(f"{name} is larger than 256 KiB.", hint="A recipe is a short script or manifest.")
        return cls(name, data.decode("utf-8", "surrogateescape"))

    def bytes_(self, text: str) -> bytes:
        """The bytes of an edited text."""
        return text.encode("utf-8", "surrogateescape")

    def chars(self) -> Chars:
        """The file itself as the outermost layer."""
        return [Char(c, i, i + 1, FILE) for i, c in enumerate(self.text)]

    def line(self, offset: int) -> int:
        """The line of an offset, counted from 1."""
        return self.text.count("\n", 0, offset) + 1

    def error(self, offset: int, what: str, hint: str = "") -> InputFileError:
        """An error that names file and line."""
        return InputFileError(f"{self.name}, line {self.line(offset)}: {what}", hint=hint)

    @property
    def newline(self) -> str:
        """The file's line end."""
        return "\r\n" if "\r\n" in self.text else "\n"


class Edit(NamedTuple):
    """Replace ``text[start:end]`` by ``new``. Edits at one place keep their order."""

    start: int
    end: int
    new: str


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """The edited text. Removals may overlap; other overlaps raise UnwritableError."""
    done: list[str] = []
    at = 0
    removed = True
    for edit in sorted(dict.fromkeys(edits), key=lambda e: (e.start, e.start != e.end)):
        if edit.start < at:
            if not removed or edit.new:
                raise UnwritableError("two changes meet at one place")
        else:
            done += [text[at : edit.start], edit.new]
        removed = not edit.new
        at = max(at, edit.end)
    return "".join([*done, text[at:]])


def replace_chars(chars: Sequence[Char], new: str) -> Edit:
    """An edit that makes this value ``new``; its characters must be one stretch of the file, in one context.

    Raises UnwritableError otherwise.
    """
    if not chars:
        raise UnwritableError("it is empty")
    first = chars[0].ctx
    for left, right in itertools.pairwise(chars):
        if right.start != left.end or right.ctx != first:
            raise UnwritableError("it is put together from several pieces")
    return Edit(chars[0].start, chars[-1].end, first.encode(new))
