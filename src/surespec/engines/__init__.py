"""Engines that can run an arm. Adding one is a file with the class and a line in ``_MAKERS``."""

from __future__ import annotations

from importlib import import_module

from surespec.engines.base import Engine, EngineSettings, RunningServer
from surespec.errors import ConfigError

_MAKERS = {
    "local": ("local", "make_local"),
    "vllm": ("vllm", "make_vllm"),
    "llamacpp": ("llamacpp", "make_llamacpp"),
    "sglang": ("sglang", "make_sglang"),
    "trtllm": ("trtllm", "make_trtllm"),
    "dynamo": ("dynamo", "make_dynamo"),
    "dynamo-local": ("dynamo", "make_dynamo_local"),
    "dynamo-sglang": ("dynamo", "make_dynamo_sglang"),
    "dynamo-trtllm": ("dynamo", "make_dynamo_trtllm"),
}
"""Name of each engine, its module, and the function in it that makes one."""

ENGINES = tuple(_MAKERS)


def make_engine(name: str, *, model: str, precision: str = "fp32", settings: EngineSettings | None = None) -> Engine:
    """The engine of that name for one model. Raises ConfigError with the known names, or what the engine raises."""
    if name not in _MAKERS:
        raise ConfigError(f"--engine {name}: there is no such engine.", hint=f"Known: {', '.join(ENGINES)}.")
    module, function = _MAKERS[name]
    make = getattr(import_module(f"surespec.engines.{module}"), function)
    chosen = settings or EngineSettings()
    engine: Engine = make(model, precision, chosen)
    if chosen.roll:
        rolling: Engine = import_module("surespec.engines.dynamo_fleet").RollingDynamo(engine)
        return rolling
    return engine


__all__ = ["ENGINES", "Engine", "EngineSettings", "RunningServer", "make_engine"]
