"""systemd units: ExecStart= with continuation lines, systemd's own quoting, ``%`` specifiers and ``$`` variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from surespec.recipe.arguments import Arg, Home, Variables
from surespec.recipe.base import Diagnosis, Kind
from surespec.recipe.locate import Server, servers_in
from surespec.recipe.text import FILE, OPAQUE, Char, Chars, Context, Source, UnwritableError, text_of
from surespec.recipe.unit_words import quote_unit

_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " "}
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


@dataclass(frozen=True)
class UnitQuote(Context):
    """Inside a word of ExecStart=. ``style``: bare, single, double."""

    style: str
    parent: Context | None = FILE

    def own(self, text: str) -> str:
        if self.style == "bare":
            return quote_unit(text)
        if not text.isprintable():
            raise UnwritableError("it holds control characters")
        spelled = text.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
        quote = "'" if self.style == "single" else '"'
        return spelled.replace(quote, "\\" + quote)


def unit_servers(source: Source) -> tuple[Kind, list[Server], list[Diagnosis]]:
    """The servers a unit's ExecStart= lines start."""
    env = Variables()
    found: list[Server] = []
    for section, key, value in _entries(source):
        if section != "Service":
            continue
        if key == "Environment":
            for arg in _words(value, source, None):
                name, equals, text = arg.text.partition("=")
                if equals:
                    uses = len(re.findall(rf"\$\{{?{re.escape(name)}\b", source.text))
                    env.set(name, arg.chars[len(arg.chars) - len(text) :], shared=uses > 1)
        elif key == "ExecStart" and not text_of(value).strip():
            found.clear()  # an empty ExecStart= drops those before it
        elif key == "ExecStart":
            skip = len(re.match(r"\s*[@\-:+!|]*", text_of(value))[0])  # type: ignore[index]
            found += servers_in(_words(value[skip:], source, env), source)
    return "systemd", found, []


def unit_settings(source: Source) -> tuple[dict[str, str], str]:
    """``Environment=`` as it ends up, and ``WorkingDirectory=`` (empty without one)."""
    env: dict[str, str] = {}
    folder = ""
    for section, key, value in _entries(source):
        if section == "Service" and key == "Environment":
            pairs = [arg.text.partition("=") for arg in _words(value, source, None)]
            env |= {name: text for name, equals, text in pairs if equals}
        elif section == "Service" and key == "WorkingDirectory":
            folder = text_of(value).strip().removeprefix("-")
    return env, folder


def _entries(source: Source) -> Iterator[tuple[str, str, Chars]]:
    """(section, key, value) of the unit. A backslash at a line's end joins the next; comments between do not count."""
    section, code, at = "", source.chars(), 0
    lines: list[tuple[int, int]] = []
    for line in source.text.splitlines(keepends=True):
        lines.append((at, at + len(line.rstrip("\r\n"))))
        at += len(line)
    i = 0
    while i < len(lines):
        start, end = lines[i]
        text = source.text[start:end].strip()
        i += 1
        if not text or text[0] in "#;":
            continue
        if text.startswith("["):
            section = text.strip("[]")
            continue
        equals = source.text.find("=", start, end)
        if equals < 0:
            raise source.error(start, f"no KEY=VALUE line: {text[:60]!r}.", "systemd would ignore it; mend the unit.")
        value = code[equals + 1 : end]
        while value and value[-1].c == "\\" and i < len(lines):
            start, end = lines[i]
            i += 1
            if source.text[start:end].lstrip().startswith(("#", ";")):
                continue
            last = value.pop()
            value.append(Char(" ", last.start, start, FILE))
            value += code[start:end]
        yield section, source.text[lines_start(source.text, equals) : equals].strip(), value


def lines_start(text: str, at: int) -> int:
    """Where the line of ``at`` begins."""
    return text.rfind("\n", 0, at) + 1


def _words(value: Chars, source: Source, env: Variables | None) -> list[Arg]:
    """Split as systemd does. ``env`` None: an Environment= line, where ``$`` is a plain character."""
    home = Home("unit", FILE)
    out: list[Arg] = []
    at = 0
    while at < len(value):
        if value[at].c.isspace():
            at += 1
            continue
        chars, end = _word(value, at, source)
        span = (value[at].start, value[end - 1].end)
        home.items.append(span)
        out += _expanded(chars, home, span, env) if env is not None else [Arg(tuple(chars), home, span)]
        at = end
    return out


def _word(value: Chars, at: int, source: Source) -> tuple[Chars, int]:
    """One word from ``at``: its characters and the index after it."""
    chars: Chars = []
    style, opened = "bare", at
    while at < len(value):
        c = value[at]
        if style == "bare" and c.c.isspace():
            break
        if style == "bare" and c.c in "'\"":
            style, opened = ("single" if c.c == "'" else "double"), at
            at += 1
            continue
        if c.c == {"single": "'", "double": '"'}.get(style):
            style = "bare"
            at += 1
            continue
        char, at = _character(value, at, UnitQuote(style))
        chars.append(char)
    if style != "bare":
        raise source.error(value[opened].start, f"the {style} quote opened here is not closed.", "Close it.")
    return chars, at


def _character(value: Chars, at: int, ctx: Context) -> tuple[Char, int]:
    c = value[at]
    following = value[at + 1].c if at + 1 < len(value) else ""
    if c.c == "\\" and following:
        code = "".join(v.c for v in value[at + 1 : at + 5])
        hexa = re.match(r"x([0-9A-Fa-f]{2})", code)
        width = 4 if hexa else 2
        meant = chr(int(hexa[1], 16)) if hexa else _ESCAPES.get(following, following)
        return Char(meant, c.start, value[at + width - 1].end, ctx), at + width
    if c.c == "%" and following == "%":
        return Char("%", c.start, value[at + 1].end, ctx), at + 2
    if c.c == "%" and following.isalpha():  # a specifier: the manager fills it in
        return Char("%", c.start, c.end, OPAQUE), at + 1
    return Char(c.c, c.start, c.end, ctx), at + 1


def _expanded(chars: Chars, home: Home, span: tuple[int, int], env: Variables) -> list[Arg]:
    """Fill in ``$NAME`` (alone: split at blanks) and ``${NAME}``; ``$$`` is a dollar."""
    text = text_of(chars)
    alone = _VARIABLE.fullmatch(text)
    if alone and alone[2]:
        known = env.scalars.get(alone[2])
        if known is None:
            return []
        inner = _words(known.chars, Source("", ""), None)
        if len(inner) == 1:
            return [Arg(tuple(known.chars), home, span, shared=known.shared)]
        return [Arg(a.chars, Home("split", FILE, [a.span]), a.span, shared=True) for a in inner]
    out: Chars = []
    unknown: list[str] = []
    shared = False
    at = 0
    while at < len(chars):
        if text.startswith("$$", at):
            out.append(Char("$", chars[at].start, chars[at + 1].end, chars[at].ctx))
            at += 2
            continue
        found = _VARIABLE.match(text, at)
        if found is None:
            if chars[at].ctx is OPAQUE:
                unknown.append(text[at : at + 2])
            out.append(chars[at])
            at += 1
            continue
        known = env.scalars.get(found[1] or found[2])
        if known is None:
            unknown.append(found[0])
            out += [c._replace(ctx=OPAQUE) for c in chars[at : found.end()]]
        else:
            out += known.chars
            shared = shared or known.shared
        at = found.end()
    return [Arg(tuple(out), home, span, tuple(unknown), shared)]
