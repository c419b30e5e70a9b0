"""Engines that can run an arm. Adding one is a file with the class and a line in ``_MAKERS``."""

from __future__ import annotations

from importlib import import_module

from surespec.engines.base import Engine, EngineSettings, RunningServer
from surespec.errors import ConfigError

_MAKERS: dict[str, tuple[str, ...]] = {
    "local": ("local", "make_local"),
    "vllm": ("vllm", "make_vllm", "--engine-python"),
    "llamacpp": ("llamacpp", "make_llamacpp", "--engine-program"),
    "sglang": ("sglang", "make_sglang", "--engine-python"),
    "trtllm": ("trtllm", "make_trtllm", "--engine-python", "--engine-program"),
    "dynamo": ("dynamo", "make_dynamo", "--engine-python"),
    "dynamo-local": ("dynamo", "make_dynamo_local", "--engine-python"),
    "dynamo-sglang": ("dynamo", "make_dynamo_sglang", "--engine-python"),
    "dynamo-trtllm": ("dynamo", "make_dynamo_trtllm", "--engine-python"),
}
"""Name of each engine: its module, the function in it that makes one, and the flags by which a user names its place."""

ENGINES = tuple(_MAKERS)


def make_engine(name: str, *, model: str, precision: str = "fp32", settings: EngineSettings | None = None) -> Engine:
    """The engine of that name for one model. Raises ConfigError with the known names, or what the engine raises."""
    if name not in _MAKERS:
        raise ConfigError(f"--engine {name}: there is no such engine.", hint=f"Known: {', '.join(ENGINES)}.")
    module, function, *_ = _MAKERS[name]
    make = getattr(import_module(f"surespec.engines.{module}"), function)
    chosen = settings or EngineSettings()
    engine: Engine = make(model, precision, chosen)
    if chosen.roll:
        rolling: Engine = import_module("surespec.engines.dynamo_fleet").RollingDynamo(engine)
        return rolling
    return engine


def takers(flag: str) -> tuple[str, ...]:
    """The engines that ``--engine-python`` or ``--engine-program`` is for."""
    return tuple(name for name, (_, _, *flags) in _MAKERS.items() if flag in flags)


__all__ = ["ENGINES", "Engine", "EngineSettings", "RunningServer", "make_engine", "takers"]
