"""Everything surespec raises on purpose.

Each error carries one sentence for a person (what is wrong, with the file, field and value) and, where it helps, a
second one that says what to do next. ``cli.py`` prints both and exits with ``exit_code``; no traceback reaches a user.

    SurespecError                     1
    ├── UsageError                    2   what the user typed or wrote (flags, JSON, prompts, recipes)
    │   ├── ConfigError               2   a speculative config, a policy, a request
    │   └── InputFileError            2   a file the user wrote: names file, line or field
    ├── ModelError                    1   weights, tokenizer, drafter: missing, broken, not fitting
    ├── FetchError                    1   a download that no source could serve, or a checksum that differs
    ├── EndpointError                 1   a server that does not answer, or answers something else
    ├── EngineError                   1   a server surespec started: start, health, stop
    │   └── PortInUseError            1
    ├── BundleError                   1   a run bundle that cannot be read or written
    └── Interrupted                   1   Ctrl-C; the bundle can be resumed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surespec.engines.failures import Failure


MESSAGE_CHARS = 500


def plain(text: str) -> str:
    """A text for a terminal: what does not print is escaped, so that no input can steer it, and its middle is left out
    where it is longer than ``MESSAGE_CHARS``."""
    if len(text) > MESSAGE_CHARS:
        half = MESSAGE_CHARS // 2 - 4
        text = f"{text[:half]} [...] {text[-half:]}"
    if text.isprintable():
        return text
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return escaped if len(escaped) <= MESSAGE_CHARS else f"{escaped[: MESSAGE_CHARS - 6]} [...]"


class SurespecError(Exception):
    """Root of the tree. ``message`` says what is wrong; ``hint`` says what to do next (may be empty)."""

    exit_code: int = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = plain(message)
        self.hint = plain(hint)

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class UsageError(SurespecError):
    """What the user typed cannot be carried out as it stands."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration (speculative config, policy, request body) has an unknown, missing or contradictory field."""


class InputFileError(UsageError):
    """A file that the user wrote (prompts, results, recipe) cannot be read; the message names file and line."""


class ModelError(SurespecError):
    """A model, tokenizer or drafter is missing, broken or does not fit its target."""


class FetchError(SurespecError):
    """A file could not be fetched, or what came is not what was asked for."""


class EndpointError(SurespecError):
    """A server does not answer, or what answers is not an OpenAI-compatible server."""


class EngineError(SurespecError):
    """An engine that surespec started failed to start, to stay healthy, or to stop. ``failure``: its kind, if known."""

    def __init__(self, message: str, *, hint: str = "", failure: Failure | None = None) -> None:
        super().__init__(message, hint=hint)
        self.failure = failure


class PortInUseError(EngineError):
    """The port asked for already belongs to another process."""


class BundleError(SurespecError):
    """A run bundle is missing, of another schema version, or cannot be written."""


class Interrupted(SurespecError):
    """The user pressed Ctrl-C; what was measured is on disk and the run can be resumed."""


__all__ = [
    "BundleError",
    "ConfigError",
    "EndpointError",
    "EngineError",
    "FetchError",
    "InputFileError",
    "Interrupted",
    "ModelError",
    "PortInUseError",
    "SurespecError",
    "UsageError",
]
