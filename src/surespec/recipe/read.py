"""Read a recipe of any kind. Recipes are parsed, never executed or given to a shell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from surespec.errors import UsageError
from surespec.input_files import read_input
from surespec.recipe.base import Diagnosis, Kind, Recipe, flag_values
from surespec.recipe.flags import Parsed, dialect, parse_flags
from surespec.recipe.locate import Server, image_version
from surespec.recipe.manifest import manifest_servers
from surespec.recipe.script import script_servers
from surespec.recipe.speculation import find, options_file
from surespec.recipe.text import Source
from surespec.recipe.unit import unit_servers

DEFAULT_PORT = {"vllm": 8000, "sglang": 30000, "trtllm": 8000, "llamacpp": 8080}
_LENGTH = {"vllm": "--max-model-len", "sglang": "--context-length", "trtllm": "--max-seq-len", "llamacpp": "--ctx-size"}
MEMORY_FLAG = {
    "vllm": "--gpu-memory-utilization",
    "sglang": "--mem-fraction-static",
    "trtllm": "--kv-cache-free-gpu-memory-fraction",
}
_SEQS = {
    "vllm": "--max-num-seqs",
    "sglang": "--max-running-requests",
    "trtllm": "--max-batch-size",
    "llamacpp": "--parallel",
}

MAX_BYTES = 128 * 1024  # far beyond any script or manifest, and read within seconds whatever it holds


def read_recipe(path: Path, *, service: str | None = None) -> Recipe:
    """Read the recipe in a file. ``service`` picks one where the file starts several.

    Raises InputFileError with file and line when it cannot be read, UsageError for a service it does not have.
    """
    hint = "Name the file that starts the deployment."
    data = read_input(path, what="a recipe", most_bytes=MAX_BYTES, hint=hint)
    return read_text(path, Source.decode(str(path), data), service=service)


def read_text(path: Path, source: Source, *, service: str | None = None, index: int | None = None) -> Recipe:
    """The same for a text at hand; ``path`` tells the kind by its name, ``index`` picks a server by its order."""
    try:
        kind, servers, diagnoses = _servers(path, source)
    except RecursionError as error:
        raise source.error(0, "this file is nested too deeply to be a recipe.", "Name another file.") from error
    if not servers:
        raise source.error(
            0,
            "no server that surespec knows is started here.",
            "It looks for vllm serve, python -m vllm.entrypoints.openai.api_server, python -m sglang.launch_server, "
            "trtllm-serve, llama-server, python -m dynamo.vllm, or a docker run of an image it knows.",
        )
    server = servers[index] if index is not None and index < len(servers) else _choose(servers, service, source)
    return replace(_recipe(path, kind, source, server, diagnoses), index=servers.index(server))


def recipe_kind(path: Path, text: str) -> str:
    """``unit``, ``yaml`` or ``shell``, by name and content."""
    if path.suffix == ".service" or re.search(r"^[ \t]*\[Service\][ \t]*\r?$", text, re.M):
        return "unit"
    if path.suffix in (".sh", ".bash") or text.startswith("#!"):
        return "shell"
    if path.suffix in (".yml", ".yaml", ".json") or re.search(r"^(apiVersion|services|kind)\s*:", text, re.M):
        return "yaml"
    return "shell"


def _servers(path: Path, source: Source) -> tuple[Kind, list[Server], list[Diagnosis]]:
    kind = recipe_kind(path, source.text)
    if kind == "unit":
        return unit_servers(source)
    if kind == "yaml":
        return manifest_servers(source, path)
    return script_servers(source)


def _choose(servers: Sequence[Server], service: str | None, source: Source) -> Server:
    names = [s.name or _model(parse_flags(s.engine, s.args)) or s.engine for s in servers]
    labels = [f"{name} (line {source.line(s.offset)})" for name, s in zip(names, servers, strict=True)]
    if service:
        fitting = [s for s, name in zip(servers, names, strict=True) if service == name]
        if not fitting and service.isdigit():
            fitting = [s for s in servers if source.line(s.offset) == int(service)]
        if len(fitting) == 1:
            return fitting[0]
        raise UsageError(f"{source.name} has no service {service}.", hint=f"It has {', '.join(labels)}.")
    if len(servers) > 1:
        raise source.error(
            servers[1].offset,
            f"{len(servers)} servers are started in this file: {', '.join(labels)}.",
            "Say which one with --service NAME (or its line number).",
        )
    return servers[0]


def _recipe(path: Path, kind: Kind, source: Source, server: Server, faults: Sequence[Diagnosis]) -> Recipe:
    engine = server.engine
    base = dialect(engine)
    parsed = parse_flags(engine, server.args)
    version = image_version(server.image) if engine == base or "ai-dynamo/" in server.image else ""
    spec = find(parsed, engine, version, source)
    diagnoses = [*faults, *_entry_faults(server, source), *spec.diagnoses]
    model = _model(parsed)
    if base == "vllm" and (flag := parsed.last("--config")) is not None:
        words = f"the file {flag.value} may set flags too; surespec reads only this one."
        fix = "What stands here counts before it."
        diagnoses.append(Diagnosis("config-file", source.line(flag.arg.span[0]), words, fix))
    if not model:
        diagnoses.append(_no_model(server, parsed, source))

    config = spec.config
    if base == "trtllm" and (options := _text(parsed, "--config")):
        config = options_file(path.parent / options)

    def number(name: str) -> int | None:
        return _whole(_text(parsed, name))

    return Recipe(
        path=path,
        kind=kind,
        engine=engine,
        image=server.image,
        engine_version=version,
        model=model,
        served_model_name=_text(parsed, "--served-model-name", "--alias"),
        host=_text(parsed, "--host"),
        port=_port(server, parsed, base),
        service=server.name,
        env=server.env,
        flags=flag_values(parsed),
        speculative_config=config,
        speculates=bool(spec.flags or config),
        gpu_memory_utilization=_fraction(_text(parsed, MEMORY_FLAG.get(base, ""))),
        max_model_len=number(_LENGTH.get(base, "")),
        max_num_seqs=number(_SEQS.get(base, "")),
        max_num_batched_tokens=number("--max-num-batched-tokens"),
        kv_cache_dtype=_text(parsed, "--kv-cache-dtype", "--cache-type-k"),
        tensor_parallel_size=number("--tp-size" if base in ("sglang", "trtllm") else "--tensor-parallel-size"),
        dtype=_text(parsed, "--dtype"),
        quantization=_text(parsed, "--quantization"),
        diagnoses=tuple(diagnoses),
        source=source,
        server=server,
        parsed=parsed,
    )


def _text(parsed: Parsed, *names: str) -> str:
    flag = parsed.last(*names)
    return "" if flag is None or flag.unknown else (flag.value or "")


def _model(parsed: Parsed) -> str:
    """The model: its flag, else the first argument that is no flag. Empty when only running would tell."""
    flag = parsed.last("--model", "--model-path", "--hf-repo")
    if flag is not None:
        return "" if any(a.unknown for a in flag.args) else (flag.value or "")
    first = parsed.positional[0] if parsed.positional else None
    return first.text if first is not None and not first.unknown else ""


def _no_model(server: Server, parsed: Parsed, source: Source) -> Diagnosis:
    line = source.line(server.offset)
    flag = parsed.last("--model", "--model-path")
    named = [u for a in (flag.args if flag else parsed.positional[:1]) for u in a.unknown]
    if named:
        words = f"the model is only known when it runs: {named[0]} has no default in this file."
        return Diagnosis("model-unknown", line, words, "Give it a default (${NAME:-model}), or name it with --model.")
    return Diagnosis("no-model", line, "the command names no model.", "Add it after serve or with --model.")


def _entry_faults(server: Server, source: Source) -> list[Diagnosis]:
    if not server.entry:
        return []
    built_in = " ".join(server.entry)
    given = server.head.text if server.head else ""
    words = f"the image {server.image} starts `{built_in}` by itself and is given the program `{given}` as well."
    fix = "A patch mends it with --entrypoint."
    if server.docker is None:
        same_program = tuple(a.text for a in server.program) in (server.entry, server.entry[-1:])
        fix = (
            "A patch takes the second one out."
            if same_program
            else f"Make `{given}` its entrypoint (Kubernetes: command)."
        )
    return [Diagnosis("doubled-entrypoint", source.line(server.offset), words, fix)]


def _port(server: Server, parsed: Parsed, base: str) -> int | None:
    inner = _whole(_text(parsed, "--port", "-p")) or DEFAULT_PORT.get(base)
    for published in server.ports:
        parts = published.split("/")[0].split(":")
        if len(parts) >= 2 and parts[-1] == str(inner) and parts[-2].isdigit():
            return int(parts[-2])
    return inner


def _whole(text: str) -> int | None:
    """32768, 32k (thousands) and 32K (1,024), as vLLM reads lengths."""
    found = re.fullmatch(r"(\d{1,12})([kKmM]?)", text)
    if not found:
        return None
    return int(found[1]) * {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}[found[2]]


def _fraction(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= 1 else None
