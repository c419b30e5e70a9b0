"""The log of a server: read from its end, cleaned for reading, and kept without the secrets in it.

Servers print their arguments and their environment, keys included. ``redact`` removes what is a secret by its name or
by its form; ``redact_file`` does so to a kept log once its server is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from surespec.recipe.base import SECRET

REMOVED = "<removed>"
TAIL_BYTES = 256 * 1024
SHORTEST_SECRET = 6  # shorter values would take words out of every line

_NAME = (
    r"(?:hf_?token|hugging_?face_?hub_?token|(?:\w*_)?api[_-]?keys?|(?:\w*_)?(?:access|auth|secret)[_-]?(?:key|token))"
)
# What is not set (None, [], '') is no secret.
_UNSET = rf"(?! (?:None|null|True|False)\b | {re.escape(REMOVED)} )"
_VALUE = rf"""(?: "[^"]+" | '[^']+' | {_UNSET} [^\s"',\[\]{{}}()-][^\s"',\]}})]* )"""
_OTHERS = r"""(?: \s* , \s* (?:"[^"]+"|'[^']+') (?=[\],]) )*"""
_SECRETS = (
    re.compile(rf"""(?ix) (?P<keep> (?<!\w) {_NAME} ["']? \s* [=:] \s* \[? ) {_VALUE} {_OTHERS}"""),
    re.compile(rf"""(?ix) (?P<keep> --{_NAME} \s+ ) {_VALUE}"""),
    re.compile(r"(?i)(?P<keep>\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{4,}"),
    re.compile(r"(?P<keep>\b[a-z][a-z0-9+.-]{1,20}://)[^\s/:@]{1,200}:[^\s/@]{1,200}(?=@)"),
    re.compile(
        r"(?P<keep>)\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|nvapi-[A-Za-z0-9_-]{16,}|ghp_[A-Za-z0-9]{20,})"
    ),
)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What engines put before a line: vLLM the process, level, date and place; llama.cpp, SGLang, TensorRT-LLM the time.
_PROCESS = re.compile(r"^\((?:\w+ )*pid=\d+\)\s?")
_LOGGER = re.compile(
    r"^(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]{1,60}\] ?"
    r"|\d+\.\d\d\.\d{3}\.\d{3} [A-Z] "
    r"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]{0,40}\] "
    r"|\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] (?:\[[\w -]{1,20}\] )*)"
)
_NOISE = re.compile(r"^[\^~\s|+=\-]*$")
_NAMED = re.compile(r"\b(?:(?i:error|refused|failed|fatal)|\w+(?:Error|Exception))\b")
_ADVICE = re.compile(r"^Run '(?:docker|podman) run --help' for more information")
# Lines that name an error and only point at another one, or are source code.
_POINTS = re.compile(r"[Ss]ee (?:root cause|(?:the )?stack trace)|^For further information visit|^raise ")


def _of_environment() -> set[str]:
    named = (value for name, value in os.environ.items() if SECRET.search(name))
    return {v for v in named if len(v) >= SHORTEST_SECRET and not v.isdigit() and not v.startswith(("/", "~"))}


_known = _of_environment()  # what is secret by its name; engines are given the same environment


def remember_secrets(values: Iterable[str]) -> None:
    """Values that are secrets whatever stands around them (a recipe's key): ``redact`` removes them from now on."""
    _known.update(value for value in values if len(value) >= SHORTEST_SECRET)


def redact(text: str) -> str:
    """The text without keys and tokens; what is left stays in its place."""
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, REMOVED)
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<keep>{REMOVED}", text)
    return text


def clean(line: str) -> str:
    """A line without colours and without what the logger puts before the message; indentation stays."""
    line = _ANSI.sub("", line.rsplit("\r", 1)[-1]).rstrip()
    return _LOGGER.sub("", _PROCESS.sub("", line))


def read_tail(path: Path, max_bytes: int = TAIL_BYTES) -> list[str]:
    """The last lines of a log, cleaned and redacted; empty where there is none. A line cut at the front is left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            text = file.read(max_bytes).decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = text.splitlines()
    if size > max_bytes:
        lines = lines[1:]
    return [redact(clean(line)) for line in lines]


def meaningful(lines: Iterable[str]) -> list[str]:
    """The lines that say something: no empty ones, no underlines of a traceback."""
    return [line.strip() for line in lines if not _NOISE.match(line)]


def last_meaningful(lines: Sequence[str], limit: int = 300) -> str:
    """The last line that names an error, else the last that says something; at most ``limit`` characters."""
    spoken = meaningful(lines)
    said = [line for line in spoken if not _ADVICE.search(line)] or spoken
    named = [line for line in said if _NAMED.search(line)]
    causes = [line for line in named if not _POINTS.search(line)]
    return (causes or named or said or [""])[-1][:limit]


def redact_file(path: Path) -> bool:
    """Rewrite a kept log without secrets, in one step; True when there was anything to remove.

    Call it when the server is gone: what it writes to a replaced file is lost. A log that is not there is left alone.
    """
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            text = file.read()
    except OSError:
        return False
    safe = "".join(redact(line) for line in text.splitlines(keepends=True))
    if safe == text:
        return False
    beside = path.with_name(f"{path.name}.part")
    try:
        with beside.open("w", encoding="utf-8", newline="") as file:
            file.write(safe)
        beside.replace(path)
    except OSError:  # no room for a second one, or none may be made: then in its own place
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        with contextlib.suppress(OSError), path.open("r+", encoding="utf-8", newline="") as file:
            file.write(safe)
            file.truncate()
    return True
