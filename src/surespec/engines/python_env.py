"""Find the Python environment that holds an engine, and which release it is. Nothing of the engine is imported.

An engine such as vLLM lives in an environment of its own. It is looked for in this order: the interpreter the user
named (``--engine-python``), ``SURESPEC_<ENGINE>_PYTHON``, the environment that ``tools/install_engine.py`` makes, this
very environment, and what is on PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from surespec.errors import ConfigError, EngineError
from surespec.json_text import loads_json

ASK_TIMEOUT_S = 30.0

# Prints which of the distributions is installed; `import vllm` would take many seconds.
_ASK = """
import json, sys
from importlib import metadata
for name in sys.argv[1:]:
    try:
        print(json.dumps([name, metadata.version(name)]))
        break
    except metadata.PackageNotFoundError:
        continue
"""


@dataclass(frozen=True, slots=True)
class PythonEnv:
    """An interpreter with an engine: which distribution, its version, and how it was found (for messages)."""

    python: Path
    distribution: str
    version: str
    found_by: str

    @property
    def prefix(self) -> Path:
        """The environment's folder."""
        return self.python.parent.parent

    def script(self, name: str) -> Path | None:
        """A console script of the environment, None when it has none of that name."""
        path = self.python.parent / name
        return path if path.is_file() and os.access(path, os.X_OK) else None


def engines_home() -> Path:
    """Where engines are installed: ``$SURESPEC_HOME/engines``, else in the user's data folder."""
    if own := os.environ.get("SURESPEC_HOME"):
        return Path(own).expanduser() / "engines"
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "surespec" / "engines"


def find_env(engine: str, distributions: Sequence[str], python: Path | None = None) -> PythonEnv:
    """The first environment that has one of ``distributions``.

    Raises ConfigError when the interpreter the user named cannot be used, EngineError when there is none at all.
    """
    variable = f"SURESPEC_{engine.upper()}_PYTHON"
    for given, flag in ((python, "--engine-python"), (_from_variable(variable), variable)):
        if given is not None:
            return _named(given, flag, engine, distributions)
    for candidate, found_by in _candidates(engine):
        if found := ask(candidate, distributions, found_by):
            return found
    raise EngineError(
        f"There is no {engine} here.",
        hint=f"Install it with `make engine-{engine}`, or name its interpreter with --engine-python or {variable}.",
    )


def ask(python: Path, distributions: Sequence[str], found_by: str = "") -> PythonEnv | None:
    """What an interpreter has of these distributions, the first that is installed; None when it has none."""
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", _ASK, *distributions],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
        )
        name, version = loads_json(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return PythonEnv(python, str(name), str(version), found_by)


def _from_variable(name: str) -> Path | None:
    value = os.environ.get(name, "")
    return Path(value) if value else None


def _named(python: Path, flag: str, engine: str, distributions: Sequence[str]) -> PythonEnv:
    """The environment the user named; an error says what is wrong with it."""
    python = python.expanduser()
    if python.is_dir():
        python = python / "bin" / "python"
    if not python.is_file():
        raise ConfigError(f"{flag}: there is no interpreter {python}.", hint="Give .../bin/python of its environment.")
    found = ask(python.absolute(), distributions, flag)
    if found is None:
        raise ConfigError(
            f"{flag}: {python} has no {engine} (looked for the distributions {' and '.join(distributions)}).",
            hint=f"Install it there, or use `make engine-{engine}`.",
        )
    return found


def _candidates(engine: str) -> Iterator[tuple[Path, str]]:
    """Interpreters to ask, best first, each once."""
    seen: set[Path] = set()
    own = engines_home() / engine / "bin" / "python"
    script = shutil.which(engine)
    places: list[tuple[Path | None, str]] = [
        (own, "installed by surespec"),
        (Path(sys.executable), "this environment"),
        (_interpreter_of(Path(script)) if script else None, f"{engine} on PATH"),
        *((Path(found), "PATH") for name in ("python3", "python") if (found := shutil.which(name))),
    ]
    for python, found_by in places:
        if python is not None and python.is_file() and python not in seen:
            seen.add(python)
            yield python, found_by


def _interpreter_of(script: Path) -> Path | None:
    """The interpreter in the first line of a console script; the script may be a link into an environment."""
    try:
        with script.open("rb") as file:
            first = file.readline(4096).decode("utf-8", "replace").strip()
    except OSError:
        return None
    words = first.removeprefix("#!").split()
    if not first.startswith("#!") or not words or Path(words[0]).name == "env":
        beside = script.resolve().parent / "python"
        return beside if beside.is_file() else None
    return Path(words[0])
