"""TensorRT-LLM as a native server: ``trtllm-serve MODEL --config FILE``, the arm in the file.

By its sources (llm_args.py@00043967) and recorded shapes; **not verified on hardware**. Its metrics have to be asked
for (``enable_iter_perf_stats``, ``return_perf_metrics``), and of iterations it keeps the last 1000 only.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surespec.core import Arm
from surespec.dialects import Deployment, methods_of
from surespec.dialects import trtllm as dialect
from surespec.engines.arm_words import deployment_of, mended_settings
from surespec.engines.base import DEFAULT_PORT, EngineSettings, FetchHook, RunningServer, StageHook
from surespec.engines.failures import Remedy
from surespec.engines.hf_target import drafter_of, fetch_folders, misfit, target_of
from surespec.engines.pace import Pace
from surespec.engines.process import HOST, free_port, start_server
from surespec.errors import ConfigError, EngineError

PROGRAM = "trtllm-serve"
START_TIMEOUT_S = 3600.0

_STAGES = (
    (re.compile(r"Loading (?:safetensors )?weights|Prefetching \S+GB checkpoint"), "loading the weights"),
    (re.compile(r"Run (?:autotuning|generation only|warmup)|warmup with", re.IGNORECASE), "warming up"),
    (re.compile(r"Creating CUDA graph instances|CUDA graph warmup", re.IGNORECASE), "capturing graphs"),
    (re.compile(r"^INFO: +(?:Application startup complete|Uvicorn running)"), "opening its port"),
)


def stage_of(line: str) -> str | None:
    """What TensorRT-LLM is doing, by a line of its log without the logger's prefix; None for one that tells nothing."""
    return next((stage for pattern, stage in _STAGES if pattern.search(line)), None)


@dataclass(frozen=True, slots=True)
class TrtllmEngine:
    """A ``trtllm-serve`` program with one target: a folder, or a Hugging Face id."""

    model: str
    target: str
    program: Path
    settings: EngineSettings
    name: str = "trtllm"
    k_by_batch_size: bool = True

    def pace(self) -> Pace:
        """A guess; nothing is decided by it."""
        return Pace(start_s=300.0, step_ms=20.0)

    def drafter(self, name: str) -> str:
        """A folder for what surespec knows; ids of Hugging Face it knows itself."""
        return drafter_of(name)

    def refusal(self, arm: Arm) -> str:
        """Methods it has no decoding type for."""
        if arm.is_baseline:
            return ""
        if arm.method not in methods_of("trtllm"):
            return f"{arm.name} is left out: TensorRT-LLM has no {arm.method}."
        return misfit(arm, self.target)

    def prepare(self, arms: Sequence[Arm], progress: FetchHook) -> None:
        """Make the Hugging Face folder of a known model. What is on Hugging Face it fetches itself."""
        fetch_folders(self.target, arms, progress)

    def command(self, arm: Arm, port: int = DEFAULT_PORT) -> list[str]:
        """What a person types: the file is written first, so it takes a shell."""
        d = self._deployment(arm, port)
        text = config_text(d)
        write = f"printf '%s' {shlex.quote(text)} > {dialect.CONFIG_FILE}"
        server = " ".join(map(shlex.quote, self._server(d, dialect.CONFIG_FILE)))
        return ["sh", "-c", f"{write} && exec {server}"]

    def mended(self, arm: Arm, remedy: Remedy) -> TrtllmEngine | None:
        """With more or less memory, or a shorter context."""
        if remedy.name in ("again", "other_port"):
            return self
        settings = mended_settings(self.settings, remedy)
        return None if settings is None else replace(self, settings=settings)

    def start(self, arm: Arm, log_path: Path, on_stage: StageHook | None = None) -> RunningServer:
        """Write the arm's file beside the log, start it and wait for its first answer. Raises EngineError."""
        port = free_port()
        d = self._deployment(arm, port)
        file = log_path.with_name(dialect.CONFIG_FILE)
        try:
            file.write_text(config_text(d), encoding="utf-8")
        except OSError as error:
            raise EngineError(f"{file} cannot be written: {error.strerror or error}.") from error
        return start_server(
            self._server(d, str(file)),
            port=port,
            log_path=log_path,
            timeout_s=START_TIMEOUT_S,
            engine=self.name,
            on_stage=on_stage,
            stage_of=stage_of,
        )

    def _deployment(self, arm: Arm, port: int) -> Deployment:
        return deployment_of("trtllm", arm, self.target, self.settings, host=HOST, port=port)

    def _server(self, d: Deployment, file: str) -> list[str]:
        argv = [str(self.program), self.target, "--host", HOST, "--port", str(d.port), *dialect.flags(d)]
        return [*argv, "--config", file]


def config_text(d: Deployment) -> str:
    """The arm's YAML with the request metrics switched on: by position they are on ``/prometheus/metrics`` only."""
    return dialect.config_yaml(d) + "return_perf_metrics: true\n"


def make_trtllm(model: str, precision: str, settings: EngineSettings) -> TrtllmEngine:
    """The TensorRT-LLM found here, for one target. Raises ConfigError, ModelError or EngineError."""
    if precision != "fp32":
        raise ConfigError(
            f"--precision {precision}: TensorRT-LLM serves the checkpoint as it is.", hint="Leave it out."
        )
    return TrtllmEngine(
        model=model, target=target_of(model, "--model"), program=_find_program(settings), settings=settings
    )


def _find_program(settings: EngineSettings) -> Path:
    """The program named, the one beside the interpreter named, or the one on PATH."""
    beside = settings.python.expanduser().absolute().parent / PROGRAM if settings.python else None
    for given, flag in ((settings.program, "--engine-program"), (beside, "--engine-python")):
        if given is None:
            continue
        if not given.is_file():
            raise ConfigError(f"{flag}: there is no {given}.", hint=f"Give the path of {PROGRAM}.")
        return given.absolute()
    found = shutil.which(PROGRAM)
    if found is None:
        raise EngineError(
            f"There is no TensorRT-LLM here ({PROGRAM} is not on PATH).",
            hint="Run surespec inside its container, or name the program with --engine-program.",
        )
    return Path(found)
