"""The embedded engine as a server process of its own, so that it is measured as it will be used."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from surespec.core import Arm
from surespec.engines.base import DEFAULT_PORT, RunningServer, StageHook
from surespec.engines.process import free_port, start_server

START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class LocalEngineProcess:
    """``surespec serve`` for one model and precision; ``model`` is a known name or a path."""

    model: str
    precision: str = "fp32"
    name: str = "local"
    k_by_batch_size: bool = True

    def command(self, arm: Arm, port: int = DEFAULT_PORT) -> list[str]:
        """``surespec serve ...`` as a person types it."""
        return ["surespec", *self._arguments(arm, port)]

    def start(self, arm: Arm, log_path: Path, on_stage: StageHook | None = None) -> RunningServer:
        """Start it with this interpreter, whatever ``surespec`` on PATH may be. Raises EngineError."""
        port = free_port()
        argv = [sys.executable, "-m", "surespec", *self._arguments(arm, port)]
        return start_server(argv, port=port, log_path=log_path, timeout_s=START_TIMEOUT_S, on_stage=on_stage)

    def _arguments(self, arm: Arm, port: int) -> list[str]:
        arguments = ["serve", "--model", self.model, "--precision", self.precision, "--port", str(port)]
        if arm.speculative_config is not None:
            arguments += ["--speculative-config", json.dumps(arm.speculative_config, separators=(",", ":"))]
        return arguments
