"""Engines that can run an arm. Adding one is a file with the class and a line in ``make_engine``."""

from __future__ import annotations

from surespec.engines.base import Engine, RunningServer
from surespec.errors import ConfigError

ENGINES = ("local",)


def make_engine(name: str, *, model: str, precision: str = "fp32") -> Engine:
    """The engine of that name for one model. Raises ConfigError with the known names."""
    if name == "local":
        from surespec.engines.local import LocalEngineProcess

        return LocalEngineProcess(model=model, precision=precision)
    raise ConfigError(f"--engine {name}: there is no such engine.", hint=f"Known: {', '.join(ENGINES)}.")


__all__ = ["ENGINES", "Engine", "RunningServer", "make_engine"]
