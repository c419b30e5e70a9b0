"""Chat templates: a model's own Jinja text, rendered in a sandbox because it comes out of a downloaded file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from surespec.errors import ConfigError

MAX_STEPS = 1_000_000  # of all its ranges together; real templates loop over the messages, which are counted elsewhere
MAX_PIECE = 1_000_000  # characters, items or bits that one operation may make
MAX_TEXT = 16_000_000  # characters of a rendered prompt
_WIDENING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "indent", "replace"})


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with bounds on what one operation may make: a template is a stranger's program."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """``*``, ``**`` and ``%`` where their result stays small."""
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if hasattr(items, "__len__") and isinstance(times, int) and len(items) * times > MAX_PIECE:
                    raise jinja2.exceptions.SecurityError("it repeats a text or list too often")
        if (
            operator == "**"
            and isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * right > MAX_PIECE
        ):
            raise jinja2.exceptions.SecurityError("it computes a number that is too large")
        if operator == "%" and isinstance(left, str) and _HUGE_WIDTH.search(left):
            raise jinja2.exceptions.SecurityError("it pads a text too far")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, *args: Any, **kwargs: Any) -> Any:
        """A call, unless it would pad a text without bound."""
        if getattr(called, "__name__", "") in _WIDENING:
            numbers = [value for value in (*args, *kwargs.values()) if isinstance(value, int)]
            wide = isinstance(getattr(called, "__self__", None), str) and _HUGE_WIDTH.search(called.__self__)
            if wide or any(number > MAX_PIECE for number in numbers):
                raise jinja2.exceptions.SecurityError("it pads a text too far")
        return super().call(context, called, *args, **kwargs)


_HUGE_WIDTH = re.compile(r"\d{6}")


def _counted_range() -> Callable[..., range]:
    """``range`` for one rendering: all of them together give at most ``MAX_STEPS`` numbers."""
    left = MAX_STEPS

    def counted(*bounds: int) -> range:
        nonlocal left
        numbers = range(*bounds)
        left -= len(numbers)
        if left < 0:
            raise OverflowError("its loops are too long")
        return numbers

    return counted


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


class ChatTemplate:
    """A compiled template. ConfigError when it is missing or cannot be compiled, and when it refuses the messages."""

    def __init__(self, source: str | None, bos_token: str = "", eos_token: str = "") -> None:
        if not source:
            raise ConfigError(
                "This model has no chat template, so chat messages cannot be turned into a prompt.",
                hint="Send the plain text to /v1/completions instead.",
            )
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"The model's chat template cannot be compiled: {error}.") from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text for ``messages``; ``variables`` are further names the template may read."""
        try:
            pieces = self._template.generate(
                range=_counted_range(),
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) if tools else None,
                **self._tokens,
                **variables,
            )
            return _joined(pieces)
        except (jinja2.TemplateError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ConfigError(
                f"The model's chat template refused the messages: {error}.",
                hint="Check the roles, their order and the content of each message.",
            ) from error


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
