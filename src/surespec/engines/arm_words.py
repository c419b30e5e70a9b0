"""An arm as the dialects want it, for engines that speak in flags or files of their own instead of vLLM's JSON."""

from __future__ import annotations

from dataclasses import replace

from surespec.core import Arm
from surespec.dialects import Deployment
from surespec.engines.base import EngineSettings
from surespec.engines.failures import Remedy
from surespec.plan_nouns import Device, Drafter, EngineName, Model, Runtime

DEFAULT_MAX_MODEL_LEN = 4096
DEFAULT_UTILIZATION = 0.85
"""Where a share of memory is lowered or raised from when none was said."""


def deployment_of(
    engine: EngineName, arm: Arm, target: str, settings: EngineSettings, *, host: str, port: int, cpu: bool = False
) -> Deployment:
    """The launch of an arm as a ``Deployment``. Sizes of model and device do not matter to how it is spelt: they are 0.

    ``speculative_config`` is vLLM's; its ``model`` becomes the drafter.
    """
    config = arm.speculative_config
    named = str((config or {}).get("model", ""))
    return Deployment(
        device=Device(
            sku="this", name="this machine", family="", kind="cpu" if cpu else "gpu", memory_gb=0, memory_bytes=0
        ),
        runtime=Runtime(engine=engine),
        model=Model(id=target, path=target, hidden_size=0, num_layers=0, num_heads=0, vocab_size=0, weight_bytes=0),
        max_model_len=settings.max_model_len or DEFAULT_MAX_MODEL_LEN,
        utilization=settings.gpu_memory_utilization,
        config=config,
        drafter=Drafter(method=arm.method, id=named) if named else None,
        max_num_seqs=settings.max_num_seqs,
        concurrency=settings.max_num_seqs,
        host=host,
        port=port,
    )


def mended_settings(settings: EngineSettings, remedy: Remedy) -> EngineSettings | None:
    """The settings changed as a remedy says: more or less memory, a shorter context; None for what is not a setting."""
    if remedy.name in ("lower_utilization", "raise_utilization"):
        share = remedy.changed(settings.gpu_memory_utilization or DEFAULT_UTILIZATION)
        return None if share is None else replace(settings, gpu_memory_utilization=share)
    if remedy.name == "shorter_context":
        length = remedy.changed(settings.max_model_len or DEFAULT_MAX_MODEL_LEN)
        return None if length is None else replace(settings, max_model_len=int(length))
    return None
