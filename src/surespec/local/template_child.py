"""Renders chat templates for its parent: a JSON line in, a JSON line out. A program of its own, started by its path.

A template comes out of a downloaded file and is a program. Jinja's sandbox keeps it from this machine; how long it runs
and how much it takes can only be bounded from outside (``[x, x]`` forty times, and printing it never ends). So it runs
in a process with little memory, that the kernel ends after some seconds of computing. Nothing of surespec is imported
here, and the environment is empty: there are no secrets to read.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NoReturn

sys.path[:0] = sys.argv[1:]  # where jinja2 lies

import jinja2  # noqa: E402
from jinja2 import nodes  # noqa: E402
from jinja2.ext import Extension  # noqa: E402
from jinja2.parser import Parser  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402

LIMIT_S = 2.0
MAX_MEMORY = 512 * 2**20
MAX_KEPT = 8  # compiled templates
MAX_TEXT = 16_000_000  # characters of a rendered prompt
TOO_MUCH = "it needs too much memory"


class _Generation(Extension):
    """``{% generation %}``: marks the assistant's text for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (declared this way by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes <, > and &, which would change what the model reads.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _joined(pieces: Iterable[str]) -> str:
    """The text, refused before it fills the memory."""
    kept: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_TEXT:
            raise OverflowError(f"it writes more than {MAX_TEXT} characters")
        kept.append(piece)
    return "".join(kept)


def _environment() -> jinja2.Environment:
    extensions = [_Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


class _Renderer:
    """Compiled templates by their source."""

    def __init__(self) -> None:
        self._environment = _environment()
        self._kept: dict[str, jinja2.Template] = {}

    def answer(self, ask: dict[str, Any]) -> dict[str, str]:
        """``text``, or ``error``: why not. Without ``variables`` the template is compiled only."""
        try:
            template = self._template(ask["source"])
            if "variables" not in ask:
                return {"text": ""}
            return {"text": _joined(template.generate(**ask["variables"]))}
        except RecursionError:
            return {"error": "it calls itself too often, or what it is given is nested too deeply"}
        except MemoryError:
            return {"error": TOO_MUCH}
        except Exception as error:
            return {"error": str(error)[:1000] or type(error).__name__}

    def _template(self, source: str) -> jinja2.Template:
        if source not in self._kept:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[source] = self._environment.from_string(source)
        return self._kept[source]


def main() -> None:
    """Answer until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes the pipe
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the timer's end is the end of this process
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    renderer = _Renderer()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        answer = renderer.answer(json.loads(line))
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
