"""The speculation a recipe already has, in vLLM's words, whatever engine and flag generation it is written for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from surespec.dialects.llamacpp import SPEC_TYPES
from surespec.dialects.sglang import ALGORITHMS
from surespec.dialects.versions import at_least, release
from surespec.recipe.base import Diagnosis
from surespec.recipe.diagnose import config_faults, flag_faults, misplaced, read_json
from surespec.recipe.flags import LEGACY_VLLM, SHORTHAND_VLLM, SPEC_FLAG, Flag, Parsed, dialect, speculative_flags
from surespec.recipe.text import Source
from surespec.rules import load_topic

_TRTLLM = {"Eagle3": "eagle3", "Eagle": "eagle3", "MTP": "mtp", "NGram": "ngram", "Draft_Target": "draft_model"}
_DRAFTLESS = {"ngram", "ngram_gpu", "suffix"}


@dataclass(frozen=True)
class Found:
    """The speculation of a recipe: its config (None: none, or none that can be read), the flags that make it."""

    config: dict[str, Any] | None
    flags: tuple[Flag, ...]
    diagnoses: tuple[Diagnosis, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether it has to be written anew even if its meaning stays."""
        return any(d.name not in ("version", "legacy-flags", "computed") for d in self.diagnoses)


def find(parsed: Parsed, engine: str, version: str, source: Source) -> Found:
    """What the flags set up."""
    flags = speculative_flags(parsed, engine)
    kind = dialect(engine)
    if kind == "vllm":
        return _vllm(parsed, flags, gate_version(engine, version), source)
    if kind == "sglang" and flags:
        return Found(_sglang(parsed), tuple(flags))
    if kind == "llamacpp" and flags:
        return Found(_llamacpp(parsed), tuple(flags))
    return Found(None, ())


def gate_version(engine: str, version: str) -> str:
    """The vLLM release that reads the config: the one this Dynamo pins, else the engine's own."""
    if not engine.startswith("dynamo"):
        return version
    pinned = load_topic("runtimes")["pins"]["dynamo"].get(version, {})
    return str(pinned.get("vllm", ""))


def _vllm(parsed: Parsed, flags: list[Flag], version: str, source: Source) -> Found:
    config: dict[str, Any] = {}
    diagnoses: list[Diagnosis] = []
    wrong = misplaced(parsed, source)
    for flag, meant, diagnosis in wrong:
        config.update(meant)
        diagnoses.append(diagnosis)
        flags = [*flags, flag]
    json_flags = [f for f in flags if f.name == SPEC_FLAG]
    if json_flags:
        reading = read_json(json_flags[-1].value or "", json_flags[-1].unknown)
        diagnoses += flag_faults(json_flags[-1], reading, source)
        config = reading.config or config
    if len(json_flags) > 1:
        line = source.line(json_flags[0].arg.span[0])
        diagnoses.append(Diagnosis("twice", line, f"{SPEC_FLAG} is given twice; the last one counts.", "Keep one."))
    for flag in flags:
        key = {**LEGACY_VLLM, **SHORTHAND_VLLM}.get(flag.name) or flag.name.partition(SPEC_FLAG + ".")[2]
        if key and flag not in [w[0] for w in wrong]:
            config[key] = _scalar(flag.value)
    legacy = [f for f in flags if f.name in LEGACY_VLLM]
    if legacy:
        _modernise(config)
        if not release(version) or at_least(version, "0.10"):
            line = source.line(legacy[0].arg.span[0])
            words = f"{legacy[0].name} is a flag of vLLM before 0.10; newer ones refuse it."
            diagnoses.append(Diagnosis("legacy-flags", line, words, f"A patch writes {SPEC_FLAG} instead."))
    if config:
        diagnoses += config_faults(config, source.line(flags[-1].arg.span[0]), version)
    return Found(config or None, tuple(flags), tuple(diagnoses))


def _modernise(config: dict[str, Any]) -> None:
    """``--speculative-model [ngram]`` meant a method; any other model was an independent draft (or an EAGLE head)."""
    model = str(config.get("model", ""))
    if model == "[ngram]":
        config["method"] = "ngram"
        del config["model"]
    elif model and "method" not in config:
        config["method"] = "eagle" if "eagle" in model.lower() and "eagle3" not in model.lower() else "draft_model"
        if "eagle3" in model.lower():
            config["method"] = "eagle3"
    config.pop("disable_logprobs", None)
    config.pop("disable_mqa_scorer", None)


def _scalar(text: str | None) -> Any:
    """A flag's value as JSON would have it."""
    if text is None:
        return True
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _text(parsed: Parsed, *names: str) -> str:
    flag = parsed.last(*names)
    return (flag.value or "") if flag else ""


def options_file(path: Path) -> dict[str, Any] | None:
    """The speculation in TensorRT-LLM's YAML file of options; None when there is no such file or nothing in it."""
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, YAMLError):
        return None
    given = content.get("speculative_config") if isinstance(content, dict) else None
    if not isinstance(given, dict) or "decoding_type" not in given:
        return None
    kind = str(given["decoding_type"])
    config: dict[str, Any] = {"method": _TRTLLM.get(kind, kind.lower())}
    model = given.get("speculative_model") or given.get("speculative_model_dir")
    if model:
        config["model"] = str(model)
    k = given.get("max_draft_len", given.get("num_nextn_predict_layers"))
    if isinstance(k, int):
        config["num_speculative_tokens"] = k
    return config


def _sglang(parsed: Parsed) -> dict[str, Any] | None:
    algorithm = _text(parsed, "--speculative-algorithm").upper()
    if not algorithm:
        return None
    methods = {name: method for method, name in ALGORITHMS.items()}
    config: dict[str, Any] = {"method": methods.get(algorithm, algorithm.lower())}
    if model := _text(parsed, "--speculative-draft-model-path"):
        config["model"] = model
    steps, tokens = _text(parsed, "--speculative-num-steps"), _text(parsed, "--speculative-num-draft-tokens")
    if steps.isdigit():
        config["num_speculative_tokens"] = int(steps)
    elif tokens.isdigit():
        config["num_speculative_tokens"] = max(1, int(tokens) - 1)
    return config


def _llamacpp(parsed: Parsed) -> dict[str, Any] | None:
    types = {name: method for method, name in SPEC_TYPES.items()}
    kind = _text(parsed, "--spec-type")
    model = _text(parsed, "--model-draft", "--hf-repo-draft")
    if kind in ("", "none") and not model:
        return None if not parsed.last("--spec-default") else {"method": "ngram"}
    method = types.get(kind, "ngram" if kind.startswith("ngram") else kind) or "draft_model"
    config: dict[str, Any] = {"method": method}
    if model and method not in _DRAFTLESS:
        config["model"] = model
    own = [f"--spec-{kind}-size-m", "--spec-ngram-mod-n-max"] if kind.startswith("ngram") else []
    k = _text(parsed, *own) if own else _text(parsed, "--spec-draft-n-max", "--draft-max")
    config["num_speculative_tokens"] = int(k) if k.isdigit() else 3
    return config
