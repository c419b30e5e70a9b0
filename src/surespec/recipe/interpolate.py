"""Variables that compose and Kubernetes fill in themselves, before any shell."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from surespec.recipe.arguments import Variables
from surespec.recipe.text import OPAQUE, Char, Chars, Doubled, text_of

_COMPOSE = re.compile(r"\$(?:\$|\{([A-Za-z_]\w*)(?:(:?[-?+])|(?=\}))|([A-Za-z_]\w*))")
_KUBERNETES = re.compile(r"\$\$\(|\$\(([A-Za-z_][\w.-]*)\)")


def dotenv(path: Path) -> dict[str, str]:
    """The ``.env`` beside a compose file, as compose reads it; empty when there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    found = {}
    for line in lines:
        match = re.fullmatch(r"\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*", line)
        if match:
            value = match[2]
            if value[:1] in ("'", '"') and value.endswith(value[0]) and len(value) > 1:
                value = value[1:-1]
            else:
                value = re.sub(r"\s+#.*$", "", value)
            found[match[1]] = value
    return found


def compose_chars(chars: Sequence[Char], variables: Mapping[str, str]) -> tuple[Chars, tuple[str, ...]]:
    """Compose's ``$NAME``, ``${NAME:-default}`` and ``$$`` filled in, and what stays unknown.

    A default keeps its place in the file, so it can be changed there; a value from ``.env`` cannot.
    """
    text = text_of(chars)
    out: Chars = []
    unknown: list[str] = []
    at = 0
    while at < len(chars):
        found = _COMPOSE.match(text, at)
        if found is None:
            out.append(chars[at]._replace(ctx=Doubled("$", chars[at].ctx)))
            at += 1
            continue
        if found[0] == "$$":
            out.append(Char("$", chars[at].start, chars[at + 1].end, Doubled("$", chars[at].ctx)))
            at += 2
            continue
        end = _closing(text, found.end()) if found[1] else found.end()
        value = variables.get(found[1] or found[3])
        operator = found[2] or ""
        if value is not None and (value or ":" not in operator) and "+" not in operator:
            out += [Char(c, chars[at].start, chars[end - 1].end, OPAQUE) for c in value]
        elif "-" in operator:
            inner, more = compose_chars(chars[found.end() : end - 1], variables)
            out += inner
            unknown += more
        elif "+" not in operator:
            out += [c._replace(ctx=OPAQUE) for c in chars[at:end]]
            unknown.append(text[at:end])
        at = end
    return out, tuple(unknown)


def compose_spans(chars: Sequence[Char]) -> list[tuple[int, int]]:
    """Where ``$NAME`` and ``${...}`` stand in the file."""
    text, at = text_of(chars), 0
    out: list[tuple[int, int]] = []
    while (found := _COMPOSE.search(text, at)) is not None:
        at = _closing(text, found.end()) if found[1] else found.end()
        out.append((chars[found.start()].start, chars[at - 1].end))
    return out


def _closing(text: str, at: int) -> int:
    """The index after the ``}`` that closes a ``${`` whose content goes on at ``at``."""
    level = 1
    while at < len(text) and level:
        level += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at


def kubernetes_chars(chars: Sequence[Char], env: Variables) -> tuple[Chars, tuple[str, ...]]:
    """Kubernetes' ``$(NAME)`` filled in from the container's ``env``; an unknown one stays as it is written."""
    text = text_of(chars)
    out: Chars = []
    unknown: list[str] = []
    at = 0
    while at < len(chars):
        found = _KUBERNETES.match(text, at)
        if found is None:
            out.append(chars[at])
            at += 1
        elif found[1] is None:
            out += [Char("$", chars[at].start, chars[at + 1].end, chars[at].ctx), chars[at + 2]]
            at += 3
        else:
            known = env.scalars.get(found[1])
            if known is None:
                unknown.append(found[0])
            out += known.chars if known else [c._replace(ctx=OPAQUE) for c in chars[at : found.end()]]
            at = found.end()
    return out, tuple(unknown)
