"""Tell an inference server by its command line; what they look like is data (``rules/servers.toml``). Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from surespec.engines.log_tail import REMOVED, redact
from surespec.rules import load_topic

LONGEST = 160
_INTERPRETER = re.compile(r"^(python|pypy)[\d.]*$")
_SHELLS = ("bash", "sh", "dash", "zsh")
_TAKES_A_VALUE = ("-X", "-W", "--check-hash-based-pycs")


@dataclass(frozen=True, slots=True)
class ServerLine:
    """A command line that is a server's. ``startable`` is false for a process that renamed itself."""

    engine: str
    name: str
    port: int | None
    host: str
    startable: bool


def server_line(argv: Sequence[str]) -> ServerLine | None:
    """What server these arguments start; None for any other program."""
    if not argv:
        return None
    if titled := next((s for s in _servers() if argv[0].startswith(s.get("title", "\0"))), None):
        return ServerLine(titled["engine"], titled["name"], None, "", startable=False)
    module, words = _program(argv)
    for server in _servers():
        wanted = server.get("module") if module else server.get("program")
        if wanted is not None and words and words[0] == wanted and server.get("first") in (None, *words[1:2]):
            flags = load_topic("servers")
            port, host = _number(flag_value(argv, flags["ports"])), flag_value(argv, flags["hosts"])
            if port is None:
                port = server.get("port")
            return ServerLine(server["engine"], server["name"], port or None, host, startable=True)  # 0: one of its own
    return None


def server_line_in_shell(argv: Sequence[str]) -> ServerLine | None:
    """The same for a container's command, which may be a shell with the server's command as its text."""
    if found := server_line(argv):
        return found
    if not argv or argv[0].rsplit("/", 1)[-1] not in _SHELLS:
        return None
    for text in argv[1:]:
        for words in _commands(text):
            if found := server_line(words):
                return found
    return None


def is_idle(argv: Sequence[str]) -> bool:
    """Whether a container's command does nothing by itself (a shell, ``sleep infinity``)."""
    return bool(argv) and argv[0].rsplit("/", 1)[-1] in load_topic("servers")["idle"]


def shortened(argv: Sequence[str]) -> str:
    """The command as a person may see it: secrets removed, cut after 160 characters."""
    hidden = list(argv)
    for place, word in enumerate(argv):
        flag, equals, _ = word.partition("=")
        if flag not in load_topic("servers")["secrets"]:
            continue
        if equals:
            hidden[place] = f"{flag}={REMOVED}"
            continue
        for after in range(place + 1, len(argv)):
            if argv[after].startswith("-"):
                break
            hidden[after] = REMOVED
    text = redact(shlex.join(hidden).replace(f"'{REMOVED}'", REMOVED))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


@cache
def _servers() -> tuple[dict[str, Any], ...]:
    return tuple(load_topic("servers")["server"])


def program_place(argv: Sequence[str]) -> int:
    """Where the program stands after an interpreter and its options: the script's place, or that of ``-m``."""
    if not _INTERPRETER.match(argv[0].rsplit("/", 1)[-1]):
        return 0
    place = 1
    while place < len(argv) and argv[place].startswith("-") and argv[place] not in ("-m", "-c"):
        place += 2 if argv[place] in _TAKES_A_VALUE else 1
    return place


def _program(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether a module is run, and the program (without folders) or module with the words after it."""
    words = list(argv[program_place(argv) :])
    if not words or words[0] == "-c":
        return False, []
    return (True, words[1:]) if words[0] == "-m" else (False, [words[0].rsplit("/", 1)[-1], *words[1:]])


def flag_value(argv: Sequence[str], flags: Sequence[str]) -> str:
    """The value of the last of these flags; empty without one."""
    value = ""
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, inline = word.partition("=")
        if flag in flags:
            value = inline if equals else after
    return value


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell's text, split at ``;``, ``&&``, ``|`` and line ends; variables stay as they are."""
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", ";"), posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        for token in lexer:
            if token and set(token) <= set(";&|"):
                yield words
                words = []
            elif token not in ("exec", "nohup") or words:
                words.append(token)
    except ValueError:
        return
    yield words
