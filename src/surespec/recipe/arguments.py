"""Arguments as a program finally gets them, each knowing the list it is written in.

Variables are filled from the script's own assignments and defaults, never from the environment: a recipe means what it
says when nothing is set around it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from surespec.recipe.shell_nouns import Assignment, Computed, Literal, Piece, Script, Simple, Variable, Word
from surespec.recipe.text import FILE, OPAQUE, Char, Context, SplitValue, text_of

_MORE_ARGUMENTS = re.compile(r"(^|_)(ARGS?|OPTS?|OPTIONS|FLAGS?|EXTRAS?)(_|$)", re.I)
_TALK = {"echo", "printf", "[", "[[", "test", "log", "info"}


@dataclass(eq=False)
class Home:
    """A list of arguments in the file.

    ``kind``: shell (a command), array, split (a variable the shell splits), unit (ExecStart), block and flow (YAML
    lists). ``items`` are the spans of its entries in order; ``ctx`` spells code of that list's language; ``quotes``
    are those of a YAML list's entries. ``locked`` says why the list must not be changed.
    """

    kind: str
    ctx: Context = FILE
    items: list[tuple[int, int]] = field(default_factory=list)
    quotes: list[str] = field(default_factory=list)
    locked: str = ""


@dataclass(frozen=True)
class Arg:
    """One argument. ``span`` is its place in ``home``; its characters may come from elsewhere (a variable).

    ``unknown`` names what only running the recipe would tell; ``shared`` is true when a variable in it is used by
    another command too, so that changing the variable would change more than this argument.
    """

    chars: tuple[Char, ...]
    home: Home
    span: tuple[int, int]
    unknown: tuple[str, ...] = ()
    shared: bool = False
    conditional: bool = False

    @property
    def text(self) -> str:
        """The value; unknown parts as they are written."""
        return text_of(self.chars)


@dataclass
class _Field:
    chars: list[Char] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    shared: bool = False
    exists: bool = False


@dataclass
class Variables:
    """What the script has assigned so far."""

    scalars: dict[str, _Field] = field(default_factory=dict)
    arrays: dict[str, list[Arg]] = field(default_factory=dict)
    uses: Counter[str] = field(default_factory=Counter)

    def count(self, script: Script) -> None:
        """Count in how many commands each variable is used; those that only talk do not matter."""
        for item in script.items:
            if isinstance(item, Simple) and not (item.words and _literal(item.words[0]) in _TALK):
                self.uses.update({n for w in item.words for n in _names(w.pieces)})

    def set(self, name: str, chars: Sequence[Char], *, shared: bool = True) -> None:
        """Give a variable a value from outside the script (a container's environment)."""
        self.scalars[name] = _Field(list(chars), shared=shared)


def _literal(word: Word) -> str:
    return "".join(text_of(p.chars) for p in word.pieces if isinstance(p, Literal))


def _names(pieces: Iterable[Piece]) -> Iterable[str]:
    for piece in pieces:
        if isinstance(piece, Variable):
            yield piece.name
            yield from _names(piece.default)


def commands(script: Script, ctx: Context, variables: Variables | None = None) -> list[list[Arg]]:
    """The script's simple commands, expanded in order. ``ctx`` spells the script's own code."""
    env = variables or Variables()
    env.count(script)
    out: list[list[Arg]] = []
    for item in script.items:
        if isinstance(item, Assignment):
            assign(item, env, ctx)
        else:
            home = Home("shell", ctx, [(w.start, w.end) for w in item.words])
            out.append([arg for word in item.words for arg in expand(word, env, home, item.conditional)])
    return out


def assign(item: Assignment, env: Variables, ctx: Context) -> None:
    """Carry out an assignment. One that may not happen never replaces a value that is there."""
    if item.array is not None:
        home = Home("array", ctx, [(w.start, w.end) for w in item.array])
        words = [arg for word in item.array for arg in expand(word, env, home, item.conditional)]
        if item.append:
            env.arrays[item.name] = [*env.arrays.get(item.name, []), *words]
        elif not (item.conditional and env.arrays.get(item.name)):
            env.arrays[item.name] = words
        return
    if item.value is None or (item.conditional and item.name in env.scalars and not item.append):
        return
    fields = _fields(item.value.pieces, env, Home("shell", ctx), split=False)
    value = fields[0] if fields and isinstance(fields[0], _Field) else _Field()
    if item.append and item.name in env.scalars:
        before = env.scalars[item.name]
        value = _Field([*before.chars, *value.chars], [*before.unknown, *value.unknown], before.shared or value.shared)
    env.scalars[item.name] = value


def expand(word: Word, env: Variables, home: Home, conditional: bool = False) -> list[Arg]:
    """The arguments one word becomes: usually one, none for an empty variable, several for an array."""
    span = (word.start, word.end)
    out: list[Arg] = []
    for entry in _fields(word.pieces, env, home, split=True):
        if isinstance(entry, Arg):
            out.append(entry)
        elif entry.exists:
            out.append(Arg(tuple(entry.chars), home, span, tuple(entry.unknown), entry.shared, conditional))
    return out


def _fields(pieces: Sequence[Piece], env: Variables, home: Home, *, split: bool) -> list[_Field | Arg]:
    """Expand pieces; with ``split``, arrays and unquoted variables may give several arguments."""
    current = _Field()
    if split and len(pieces) == 1 and isinstance(pieces[0], Variable):
        only = pieces[0]
        if only.array:
            return list(env.arrays.get(only.name, []))
        if not only.quoted:
            value = _value(only, env)
            text = text_of(value.chars)
            if value.unknown and text == text_of(only.raw) and _MORE_ARGUMENTS.search(only.name):
                return []
            if re.search(r"\s", text.strip()) and not value.unknown:
                return list(_split(value))
    for piece in pieces:
        if isinstance(piece, Literal):
            current.chars += piece.chars
            current.exists = current.exists or bool(piece.chars) or piece.quoted
        else:
            value = _value(piece, env)
            current.chars += value.chars
            current.unknown += value.unknown
            current.shared = current.shared or value.shared
            current.exists = current.exists or bool(value.chars) or piece.quoted
    return [current]


def _value(piece: Variable | Computed, env: Variables) -> _Field:
    """What a variable stands for when only the script sets it."""
    if isinstance(piece, Variable):
        known = env.scalars.get(piece.name)
        if known is None and piece.array:
            known = _Field([c for arg in env.arrays.get(piece.name, []) for c in arg.chars])
        if piece.op in (":+", "+"):
            known = _default(piece, env) if known is not None and known.chars else _Field()
        elif piece.op in (":-", "-", ":=", "=") and (known is None or (":" in piece.op and not known.chars)):
            known = _default(piece, env)
        elif piece.op.startswith(":") and piece.op[1:2].isdigit():
            known = None
        if known is not None:
            return _Field(known.chars, known.unknown, known.shared or env.uses[piece.name] > 1)
    raw = text_of(piece.raw)
    return _Field([Char(c.c, c.start, c.end, OPAQUE) for c in piece.raw], [raw])


def _default(piece: Variable, env: Variables) -> _Field:
    fields = _fields(piece.default, env, Home("shell"), split=False)
    return fields[0] if fields and isinstance(fields[0], _Field) else _Field()


def _split(value: _Field) -> Iterable[Arg]:
    """The words of a variable's text. Its characters keep their place, so a word can be changed there."""
    home = Home("split")
    run: list[Char] = []
    for char in [*value.chars, Char(" ", 0, 0, FILE)]:
        if not char.c.isspace():
            ctx = SplitValue(char.ctx) if char.ctx is not OPAQUE else OPAQUE
            run.append(char._replace(ctx=ctx))
        elif run:
            span = (run[0].start, run[-1].end)
            home.items.append(span)
            yield Arg(tuple(run), home, span, shared=value.shared)
            run = []
