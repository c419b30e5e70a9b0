"""SGLang as a native server: ``python -m sglang.launch_server`` of the environment that has it.

By its sources (0.5.23) and recorded shapes; its parser and its server without speculation run on a CPU, speculation
needs its CUDA kernels and is **not verified on hardware**.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surespec.core import Arm
from surespec.dialects import methods_of
from surespec.dialects import sglang as dialect
from surespec.engines.arm_words import deployment_of, mended_settings
from surespec.engines.base import DEFAULT_PORT, EngineSettings, FetchHook, RunningServer, StageHook
from surespec.engines.failures import Remedy
from surespec.engines.hf_target import drafter_of, fetch_folders, misfit, target_of
from surespec.engines.pace import Pace
from surespec.engines.process import HOST, free_port, start_server
from surespec.engines.python_env import PythonEnv, ask, find_env
from surespec.errors import ConfigError

START_TIMEOUT_S = 1800.0
READY = "The server is fired up and ready to roll!"

# Without them the server of 0.5.23 does not run on a CPU: its own kernels are CUDA's. float32 as for vLLM.
_CPU_FLAGS = (
    "--device", "cpu", "--disable-overlap-schedule", "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch", "--grammar-backend", "none", "--dtype", "float32",
)  # fmt: skip
_STAGES = (
    (re.compile(r"^Load weight begin"), "loading the weights"),
    (re.compile(r"^(KV Cache is allocated|Memory pool end)"), "warming up"),
    (re.compile(r"^Capture \w+ graph begin|^Capturing batches"), "capturing graphs"),
    (re.compile(re.escape(READY)), "opening its port"),
)


def stage_of(line: str) -> str | None:
    """What SGLang is doing, by a line of its log without the logger's prefix; None for one that does not tell."""
    return next((stage for pattern, stage in _STAGES if pattern.search(line)), None)


@dataclass(frozen=True, slots=True)
class SglangEngine:
    """An SGLang environment with one target: a folder, or a Hugging Face id. ``cpu``: its torch has no CUDA."""

    model: str
    target: str
    env: PythonEnv
    cpu: bool
    settings: EngineSettings
    name: str = "sglang"
    k_by_batch_size: bool = False

    def pace(self) -> Pace:
        """A guess from its start without speculation on a CPU; nothing is decided by it."""
        return Pace(start_s=60.0 if self.cpu else 180.0, step_ms=100.0 if self.cpu else 20.0)

    def drafter(self, name: str) -> str:
        """A folder for what surespec knows; ids of Hugging Face it knows itself."""
        return drafter_of(name)

    def refusal(self, arm: Arm) -> str:
        """Methods it has no algorithm for; on a CPU, all of them."""
        if arm.is_baseline:
            return ""
        if arm.method not in methods_of("sglang"):
            return f"{arm.name} is left out: SGLang has no {arm.method}."
        if self.cpu:
            return (
                f"{arm.name} is left out: SGLang's speculation needs its CUDA kernels (sgl_kernel), and this is a CPU."
            )
        return misfit(arm, self.target)

    def prepare(self, arms: Sequence[Arm], progress: FetchHook) -> None:
        """Make the Hugging Face folder of a known model. What is on Hugging Face it fetches itself."""
        fetch_folders(self.target, arms, progress)

    def command(self, arm: Arm, port: int = DEFAULT_PORT) -> list[str]:
        """The line a person types."""
        d = deployment_of("sglang", arm, self.target, self.settings, host=HOST, port=port)
        argv = [str(self.env.python), "-m", "sglang.launch_server", "--model-path", self.target]
        argv += ["--host", HOST, "--port", str(port), *dialect.flags(d)]
        if self.cpu:
            # Without a limit it takes most of the memory for its KV cache.
            argv += [*_CPU_FLAGS, "--max-total-tokens", str(d.max_model_len * self.settings.max_num_seqs)]
        return argv

    def mended(self, arm: Arm, remedy: Remedy) -> SglangEngine | None:
        """With more or less memory, or a shorter context."""
        if remedy.name in ("again", "other_port"):
            return self
        settings = mended_settings(self.settings, remedy)
        return None if settings is None else replace(self, settings=settings)

    def start(self, arm: Arm, log_path: Path, on_stage: StageHook | None = None) -> RunningServer:
        """Start the arm and wait for its first answer. Raises EngineError."""
        port = free_port()
        return start_server(
            self.command(arm, port),
            port=port,
            log_path=log_path,
            timeout_s=START_TIMEOUT_S,
            engine=self.name,
            on_stage=on_stage,
            stage_of=stage_of,
        )


def make_sglang(model: str, precision: str, settings: EngineSettings) -> SglangEngine:
    """The SGLang found here, for one target. Raises ConfigError, ModelError or EngineError."""
    if precision != "fp32":
        raise ConfigError(f"--precision {precision}: SGLang serves the checkpoint as it is.", hint="Leave it out.")
    env = find_env("sglang", ("sglang",), settings.python)
    torch = ask(env.python, ("torch",))
    return SglangEngine(
        model=model,
        target=target_of(model, "--model"),
        env=env,
        cpu=torch is not None and "+cpu" in torch.version,
        settings=settings,
    )
