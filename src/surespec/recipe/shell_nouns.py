"""What shell text is made of. Offsets count the file's characters."""

from __future__ import annotations

from dataclasses import dataclass, field

from surespec.recipe.text import Char


@dataclass(frozen=True)
class Literal:
    """Characters that stand for themselves."""

    chars: tuple[Char, ...]
    quoted: bool


@dataclass(frozen=True)
class Variable:
    """``$NAME``, ``${NAME:-default}``, ``${NAME[@]}``. ``op`` is "" or one of ``:- - := = :? ? :+ +`` or unread."""

    name: str
    raw: tuple[Char, ...]
    quoted: bool
    array: bool = False
    op: str = ""
    default: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Computed:
    """``$(...)``, backticks, arithmetic, a process substitution: only running it gives the value."""

    raw: tuple[Char, ...]
    quoted: bool


Piece = Literal | Variable | Computed


@dataclass(frozen=True)
class Word:
    """One word as written. ``start`` and ``end`` are offsets in the file."""

    pieces: tuple[Piece, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Assignment:
    """``NAME=value`` or ``NAME=(words)``, ``+=`` with ``append``."""

    name: str
    value: Word | None
    array: tuple[Word, ...] | None
    append: bool
    conditional: bool


@dataclass(frozen=True)
class Simple:
    """A simple command; ``assigned`` are the assignments in front of it."""

    words: tuple[Word, ...]
    assigned: tuple[Assignment, ...]
    conditional: bool


@dataclass(frozen=True)
class HereDoc:
    """A here-document's body (offsets in the file)."""

    start: int
    end: int
    text: str


@dataclass
class Script:
    """What was read, in order."""

    items: list[Simple | Assignment] = field(default_factory=list)
    heredocs: list[HereDoc] = field(default_factory=list)
