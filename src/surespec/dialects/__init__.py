"""One arm in the words of each engine. Pure: a ``Deployment`` in, a ``Command`` out."""

from __future__ import annotations

from collections.abc import Callable

from surespec.dialects import dynamo, llamacpp, local, sglang, trtllm, vllm
from surespec.dialects.base import Command, Deployment, compact_json, shell_line, to_yaml

_RENDER: dict[str, Callable[[Deployment], Command]] = {
    "vllm": vllm.render,
    "sglang": sglang.render,
    "trtllm": trtllm.render,
    "llamacpp": llamacpp.render,
    "dynamo": dynamo.render,
    "local": local.render,
}

# Which methods an engine can be told to use at all; versions are checked apart.
METHODS: dict[str, tuple[str, ...]] = {
    "vllm": ("eagle3", "draft_model", "ngram", "mtp", "dflash", "dspark"),
    "sglang": tuple(m for m in sglang.ALGORITHMS if m != "eagle"),
    "trtllm": tuple(trtllm.DECODING_TYPES),
    "llamacpp": tuple(llamacpp.SPEC_TYPES),
    "local": ("eagle3", "draft_model", "ngram"),
}


def render(deployment: Deployment) -> Command:
    """The launch in the words of the deployment's engine."""
    return _RENDER[deployment.runtime.engine](deployment)


def methods_of(engine: str, host_engine: str = "vllm") -> tuple[str, ...]:
    """The methods an engine knows; Dynamo's are those of the engine inside."""
    return METHODS[host_engine if engine == "dynamo" else engine]


__all__ = ["METHODS", "Command", "Deployment", "compact_json", "methods_of", "render", "shell_line", "to_yaml"]
