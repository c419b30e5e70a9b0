"""The embedded engine as a server process of its own, so that it is measured as it will be used."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from surespec.core import Arm
from surespec.engines.base import DEFAULT_PORT, EngineSettings, FetchHook, RunningServer, StageHook
from surespec.engines.failures import Remedy
from surespec.engines.pace import Pace, parameters_of, step_ms
from surespec.engines.process import free_port, start_server
from surespec.fetch import resolve_model

START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class LocalEngineProcess:
    """``surespec serve`` for one model and precision; ``model`` is a known name or a path."""

    model: str
    precision: str = "fp32"
    max_model_len: int | None = None
    name: str = "local"
    k_by_batch_size: bool = True

    def pace(self) -> Pace:
        """By the model's size: it loads in seconds."""
        step = step_ms(parameters_of(self.model), self.precision)
        return Pace(start_s=5.0 + 0.1 * step, step_ms=step)

    def drafter(self, name: str) -> str:
        """It knows names and paths itself."""
        return name

    def refusal(self, arm: Arm) -> str:
        """It runs every method ``tune`` tries."""
        return ""

    def prepare(self, arms: Sequence[Arm], progress: FetchHook) -> None:
        """Fetch a known model, and find every drafter."""
        drafters = (arm.speculative_config.get("model") for arm in arms if arm.speculative_config)
        for name in (self.model, *drafters):
            if name is not None:
                resolve_model(name, progress)

    def command(self, arm: Arm, port: int = DEFAULT_PORT) -> list[str]:
        """``surespec serve ...`` as a person types it."""
        return ["surespec", *self._arguments(arm, port)]

    def mended(self, arm: Arm, remedy: Remedy) -> LocalEngineProcess | None:
        """It can only be started again."""
        return self if remedy.name in ("again", "other_port") else None

    def start(self, arm: Arm, log_path: Path, on_stage: StageHook | None = None) -> RunningServer:
        """Start it with this interpreter, whatever ``surespec`` on PATH may be. Raises EngineError."""
        port = free_port()
        argv = [sys.executable, "-m", "surespec", *self._arguments(arm, port)]
        return start_server(
            argv, port=port, log_path=log_path, timeout_s=START_TIMEOUT_S, engine=self.name, on_stage=on_stage
        )

    def _arguments(self, arm: Arm, port: int) -> list[str]:
        arguments = ["serve", "--model", self.model, "--precision", self.precision, "--port", str(port)]
        arguments += ["--max-model-len", str(self.max_model_len)] if self.max_model_len is not None else []
        if arm.speculative_config is not None:
            arguments += ["--speculative-config", json.dumps(arm.speculative_config, separators=(",", ":"))]
        return arguments


def make_local(model: str, precision: str, settings: EngineSettings) -> LocalEngineProcess:
    """The embedded engine: of the settings only the context is its."""
    return LocalEngineProcess(model=model, precision=precision, max_model_len=settings.max_model_len)
