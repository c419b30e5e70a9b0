"""llama.cpp as a native ``llama-server``: what this build can do is read from its ``--help``, never from a version.

Builds differ in how drafting is spelt. Since the renaming there is ``--spec-type`` with a flag of its own for every
kind; before it ``--draft-max`` for a draft model. In newer builds the old names are still listed, with the remark that
they have been removed, and end the server. ``--spec-draft-n-max`` bounds draft models only: an n-gram drafter drafts
``--spec-ngram-simple-size-m`` tokens (48 unless told otherwise), seen on the server of the wheel xllamacpp 2026.10.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surespec.core import Arm
from surespec.dialects.llamacpp import SPEC_TYPES, gguf_name
from surespec.engines.base import DEFAULT_PORT, EngineSettings, FetchHook, RunningServer, StageHook
from surespec.engines.failures import Remedy
from surespec.engines.pace import Pace, parameters_of, step_ms
from surespec.engines.process import HOST, free_port, start_server
from surespec.engines.python_env import engines_home
from surespec.errors import ConfigError, EngineError, ModelError, SurespecError
from surespec.fetch import PACKAGED_HEADS, cache_dir, fetch, hf_folder, known_models, packaged_head
from surespec.models import resolve

PROGRAM = "llama-server"
VARIABLE = "SURESPEC_LLAMACPP_PROGRAM"
START_TIMEOUT_S = 600.0
DEFAULT_MAX_MODEL_LEN = 4096
_HELP_TIMEOUT_S = 60.0
_INSTALL = "Install it with `make engine-llamacpp`, or name the program with --engine-program or " + VARIABLE + "."
_REMOVED = "the argument has been removed"
_FLAG = re.compile(r"(-{1,2}[A-Za-z][\w-]*)(,?)\s*")

_STAGES = (
    (re.compile(r"loading draft model"), "loading the drafter"),
    (re.compile(r"(loading model '|: loading model$)"), "loading the weights"),
    (re.compile(r"warming up the model"), "warming up"),
    (re.compile(r"(server is listening|listening on http)"), "opening its port"),
)


def stage_of(line: str) -> str | None:
    """What llama-server is doing, by a line of its log without the logger's prefix; None for one that does not tell."""
    return next((stage for pattern, stage in _STAGES if pattern.search(line)), None)


def parse_help(text: str) -> frozenset[str]:
    """The flags a build takes, all their names, out of its ``--help``; those it lists as removed are left out."""
    known: set[str] = set()
    names: list[str] = []
    entry = ""
    for line in [*text.splitlines(), "-"]:
        if not line.startswith("-"):
            entry += " " + line.strip()
            continue
        if _REMOVED not in entry:
            known.update(names)
        names, entry, at = [], line, 0
        while found := _FLAG.match(line, at):
            names.append(found[1])
            at = found.end()
            if not found[2]:
                break
    return frozenset(known)


def draft_flags(config: Mapping[str, Any], flags: frozenset[str], draft_file: str = "") -> list[str]:
    """The arm's flags in the words of a build that takes ``flags``.

    ``config`` is vLLM's: ``method``, ``num_speculative_tokens``, ``prompt_lookup_min``; ``method`` may also be one of
    llama.cpp's own kinds (``ngram-mod``). Raises ConfigError for what the build cannot do.
    """
    method, k = str(config["method"]), int(config["num_speculative_tokens"])
    kind = SPEC_TYPES.get(method, method)
    match = int(config.get("prompt_lookup_min") or 2)
    draft = ["-md", draft_file] if draft_file else []
    if "--spec-type" not in flags:
        if kind != "draft-simple" or "--draft-max" not in flags:
            raise ConfigError(
                f"This build of llama.cpp cannot draft with {method}: its --help has no --spec-type.",
                hint="A newer llama.cpp can.",
            )
        return [*draft, "--draft-max", str(k), "--draft-min", "0"]
    argv = ["--spec-type", kind, *draft]
    if kind == "ngram-mod":
        wanted = [("--spec-ngram-mod-n-match", match), ("--spec-ngram-mod-n-min", 1), ("--spec-ngram-mod-n-max", k)]
    elif kind in ("ngram-simple", "ngram-map-k", "ngram-map-k4v"):
        own = f"--spec-{kind}-size"
        stem = own if f"{own}-m" in flags else "--spec-ngram-size"  # one pair for all kinds in early 2026
        wanted = [(f"{stem}-n", match), (f"{stem}-m", k)]
    else:
        wanted = [("--spec-draft-n-max", k)]
    for flag, value in wanted:
        if flag not in flags:
            raise ConfigError(
                f"This build of llama.cpp has no {flag}, so {method} cannot be set to {k} tokens.",
                hint="A newer llama.cpp can.",
            )
        argv += [flag, str(value)]
    return argv


def unconverted(arm: Arm, target: str) -> str:
    """Why a draft that is no GGUF file yet leaves an arm out, with the command that makes it one; empty for others.

    ``target`` is the Hugging Face folder of the target, which the conversion of a head needs.
    """
    draft = str((arm.speculative_config or {}).get("model", ""))
    if not draft or draft.lower().endswith(".gguf"):
        return ""
    head = f" --target-model-dir {target}" if arm.method in ("eagle3", "draft-eagle3") else ""
    return (
        f"{arm.name} is left out: llama.cpp reads {Path(draft).name} only as GGUF. Make it with llama.cpp's "
        f"convert_hf_to_gguf.py {draft}{head} --outfile {gguf_name(draft)} and name that file."
    )


@dataclass(frozen=True, slots=True)
class LlamaBuild:
    """A ``llama-server`` program: where it is, what it takes, and the folder of its libraries (None: found alone)."""

    program: Path
    flags: frozenset[str]
    libraries: Path | None = None

    @property
    def variables(self) -> dict[str, str]:
        """What has to be set for it: the path of libraries that lie beside it, before what is set already."""
        if self.libraries is None:
            return {}
        others = os.environ.get("LD_LIBRARY_PATH", "")
        return {"LD_LIBRARY_PATH": f"{self.libraries}{os.pathsep + others if others else ''}"}


def find_build(program: Path | None = None) -> LlamaBuild:
    """The build to use: the one named, else ``SURESPEC_LLAMACPP_PROGRAM``, the installed one, the one on PATH.

    Raises ConfigError when what was named is no program, EngineError when there is none or it does not run.
    """
    named = program or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if named is not None:
        named = named.expanduser().absolute()
        if named.is_dir():
            named = named / PROGRAM
        if not (named.is_file() and os.access(named, os.X_OK)):
            raise ConfigError(f"There is no program {named}.", hint="Give the path of llama-server.")
        return _probed(named)
    on_path = shutil.which(PROGRAM)
    for candidate in (engines_home() / "llamacpp" / "bin" / PROGRAM, Path(on_path) if on_path else None):
        if candidate is not None and candidate.is_file():
            return _probed(candidate.absolute())
    raise EngineError("There is no llama.cpp here.", hint=_INSTALL)


def _probed(program: Path) -> LlamaBuild:
    """Ask the program for its flags; what it says on standard error counts too."""
    folder = program.resolve().parent
    libraries = folder if any(folder.glob("lib*.so*")) else None
    build = LlamaBuild(program, frozenset(), libraries)
    try:
        done = subprocess.run(
            [str(program), "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_HELP_TIMEOUT_S,
            env={**os.environ, **build.variables},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{program} --help cannot be run: {error}.", hint=_INSTALL) from error
    flags = parse_help(f"{done.stdout}\n{done.stderr}")
    if not {"--host", "--port"} <= flags:
        said = " ".join((done.stderr or done.stdout).split())[-200:]
        raise EngineError(f"{program} is no llama-server: its --help names no --port ({said}).", hint=_INSTALL)
    return LlamaBuild(program, flags, libraries)


@dataclass(frozen=True, slots=True)
class LlamaCppEngine:
    """A llama.cpp build with one target. ``target`` is the GGUF file; ``model`` what the user called it."""

    model: str
    target: Path
    build: LlamaBuild
    settings: EngineSettings
    name: str = "llamacpp"
    k_by_batch_size: bool = False

    def pace(self) -> Pace:
        """By the file's size: it starts in seconds, and a step reads the quantised weights once."""
        parameters = parameters_of(self.model if self.model in known_models() else str(self.target))
        return Pace(start_s=4.0 + parameters / 2e9, step_ms=step_ms(parameters, "int4"))

    def drafter(self, name: str) -> str:
        """A GGUF file, or a known model's; heads in the Hugging Face layout have to be converted first."""
        if name in known_models() and not Path(name).exists():
            return str(gguf_of(name, "--draft-model"))
        if name in PACKAGED_HEADS:
            return str(packaged_head(name))
        path = Path(name).expanduser()
        return str(path.absolute()) if path.exists() else name

    def refusal(self, arm: Arm) -> str:
        """What this build cannot do, or a draft that is not a GGUF file yet (with the command that makes it one)."""
        if arm.speculative_config is None:
            return ""
        own = str(hf_folder(self.model)) if self.model in known_models() else "FOLDER-OF-THE-TARGET"
        if problem := unconverted(arm, own):
            return problem
        try:
            draft_flags(arm.speculative_config, self.build.flags, str(arm.speculative_config.get("model", "")))
        except ConfigError as error:
            return f"{arm.name} is left out: {error.message}"
        return ""

    def prepare(self, arms: Sequence[Arm], progress: FetchHook) -> None:
        """Fetch a known model; a draft has to be there."""
        named = [str((arm.speculative_config or {}).get("model", "")) for arm in arms]
        for key in known_models():
            if self.model == key or any(name == str(gguf_of(key, "--draft-model")) for name in named):
                fetch(key, "gguf", progress)
        for name in (str(self.target), *filter(None, named)):
            if not Path(name).is_file():
                raise ModelError(f"There is no file {name}.", hint="llama.cpp serves GGUF files.")

    def command(self, arm: Arm, port: int = DEFAULT_PORT) -> list[str]:
        """The line a person types."""
        settings = [f"{name}={value}" for name, value in self.build.variables.items()]
        return [*(["env", *settings] if settings else []), *self._server(arm, port)]

    def mended(self, arm: Arm, remedy: Remedy) -> LlamaCppEngine | None:
        """With a shorter context; memory it takes as the context and the file need it."""
        if remedy.name in ("again", "other_port"):
            return self
        if remedy.name != "shorter_context" or (length := remedy.changed(self._max_model_len())) is None:
            return None
        return replace(self, settings=replace(self.settings, max_model_len=int(length)))

    def start(self, arm: Arm, log_path: Path, on_stage: StageHook | None = None) -> RunningServer:
        """Start the arm and wait for its first answer. Raises EngineError."""
        port = free_port()
        return start_server(
            self._server(arm, port),
            port=port,
            log_path=log_path,
            timeout_s=START_TIMEOUT_S,
            engine=self.name,
            env=self.build.variables,
            on_stage=on_stage,
            stage_of=stage_of,
        )

    def _server(self, arm: Arm, port: int) -> list[str]:
        """Slots share ``-c``, so it is the context of one request times their number."""
        slots = self.settings.max_num_seqs
        argv = [str(self.build.program), "-m", str(self.target), "--host", HOST, "--port", str(port)]
        argv += ["-c", str(self._max_model_len() * slots), "-np", str(slots)]
        argv += ["--metrics"] if "--metrics" in self.build.flags else []
        if arm.speculative_config is not None:
            draft = str(arm.speculative_config.get("model", ""))
            argv += draft_flags(arm.speculative_config, self.build.flags, draft)
        return argv

    def _max_model_len(self) -> int:
        """The user's; else 4096, or less where the model cannot. A file that is not there yet counts as able."""
        if self.settings.max_model_len is not None:
            return self.settings.max_model_len
        try:
            limit = resolve(str(self.target)).max_position_embeddings
        except SurespecError:
            limit = 0
        return min(DEFAULT_MAX_MODEL_LEN, limit) if limit else DEFAULT_MAX_MODEL_LEN


def make_llamacpp(model: str, precision: str, settings: EngineSettings) -> LlamaCppEngine:
    """The llama.cpp found here, for one target. Raises ConfigError, ModelError or EngineError."""
    if precision != "fp32":
        raise ConfigError(
            f"--precision {precision}: llama.cpp serves a GGUF file as it is quantised.",
            hint="Leave --precision out, and choose the file.",
        )
    target = gguf_of(model, "--model")
    return LlamaCppEngine(
        model=model if model in known_models() and not Path(model).exists() else str(target),
        target=target,
        build=find_build(settings.program),
        settings=settings,
    )


def gguf_of(name: str, flag: str) -> Path:
    """The GGUF file behind a name or a path; a known model's is where ``fetch`` puts it. Raises ModelError."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return path.absolute()
    if name in known_models() and not path.exists():
        return cache_dir() / name / known_models()[name].file
    if name in PACKAGED_HEADS or path.exists():
        raise ModelError(
            f"{flag} {name}: llama.cpp wants a GGUF file.",
            hint=f"Make it with llama.cpp's own: convert_hf_to_gguf.py {name} --outfile {gguf_name(name)}",
        )
    raise ModelError(
        f"There is no model {name!r}: it is not a GGUF file here, nor a name surespec knows.",
        hint=f"Give a .gguf file, or one of: {', '.join(known_models())}.",
    )
