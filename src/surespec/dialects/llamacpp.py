"""llama.cpp: ``llama-server`` flags, new names and those of builds before the renaming (docs/speculative.md)."""

from __future__ import annotations

from surespec.dialects.base import Command, Deployment, docker_prefix, shell_line

SPEC_TYPES = {
    "draft_model": "draft-simple",
    "eagle3": "draft-eagle3",
    "mtp": "draft-mtp",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
    "ngram": "ngram-simple",
}


def gguf_name(model_id: str) -> str:
    """The file a checkpoint is expected in: itself when it is one, else its name with ``.gguf``."""
    return model_id if model_id.lower().endswith(".gguf") else f"{model_id.rsplit('/', 1)[-1]}.gguf"


def speculative_flags(d: Deployment) -> list[str]:
    """The arm's flags; the old names knew only an independent draft model."""
    if not d.config:
        return []
    draft = ["-md", gguf_name(d.drafter.id)] if d.drafter is not None and d.drafter.id else []
    if d.old_llamacpp_flags:
        return [*draft, "--draft-max", str(d.k), "--draft-min", "0"]
    argv = ["--spec-type", SPEC_TYPES[d.method], *draft]
    if d.method == "ngram":
        # --spec-draft-n-max bounds draft models only; the m-gram (48 unless told) is what ngram-simple drafts.
        match = str(d.config.get("prompt_lookup_min") or 2)
        return [*argv, "--spec-ngram-simple-size-n", match, "--spec-ngram-simple-size-m", str(d.k)]
    return [*argv, "--spec-draft-n-max", str(d.k)]


def render(d: Deployment) -> Command:
    """``llama-server`` with metrics and as many slots as the asked concurrency (they share ``-c``)."""
    slots = max(1, d.concurrency)
    path = d.model.path if d.model.format == "gguf" and d.model.path else gguf_name(d.model.path or d.model.id)
    argv = ["llama-server", "-m", path, "--host", d.host, "--port", str(d.port)]
    argv += ["-c", str(d.max_model_len * slots), "-np", str(slots)]
    if d.device.kind != "cpu":
        argv += ["-ngl", "99"]
    if d.kv_dtype.startswith("fp8"):
        argv += ["-ctk", "q8_0", "-ctv", "q8_0"]
    argv += [*speculative_flags(d), "--metrics"]
    notes = []
    if d.model.format != "gguf":
        notes.append(f"{path} is made by llama.cpp's convert_hf_to_gguf.py from {d.model.id}, or downloaded as GGUF.")
    if d.drafter is not None and d.drafter.id and not d.drafter.id.lower().endswith(".gguf"):
        target = f" --target-model-dir {d.model.id}" if d.method == "eagle3" else ""
        notes.append(f"{gguf_name(d.drafter.id)}: convert_hf_to_gguf.py {d.drafter.id}{target}.")
    if d.runtime.image:
        argv = [*docker_prefix(d, "llamacpp"), *argv]
    return Command(tuple(argv), shell_line(argv), notes=tuple(notes))
