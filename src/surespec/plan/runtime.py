"""Which runtime a device gets for an engine (C4, E1), and whether the one that is there may be used."""

from __future__ import annotations

from surespec.dialects.versions import at_least, release
from surespec.errors import UsageError
from surespec.plan_nouns import ENGINE_NAMES, Device, Model, Refusal, Runtime
from surespec.rules import load_topic

LOCAL_MODEL_TYPES = ("llama", "qwen2", "qwen3")


def default_engine(device: Device) -> str:
    """vLLM where there is a GPU, the embedded engine elsewhere."""
    return "local" if device.kind == "cpu" else "vllm"


def runtime_for(
    device: Device,
    engine: str = "",
    version: str = "",
    image: str = "",
    *,
    native: bool = False,
    speculating: bool = False,
) -> Runtime:
    """The runtime of an engine on this device: the user's image and version, else the table's.

    ``native``: the engine is installed here, so no image is taken from the table (C4's validated native build).
    ``dynamo-sglang`` and ``dynamo-trtllm`` name the engine inside. Raises UsageError for an unknown engine.
    """
    name = (engine or default_engine(device)).lower().replace("llama.cpp", "llamacpp").replace("tensorrt-llm", "trtllm")
    host = "vllm"
    if name.startswith("dynamo-"):
        name, host = "dynamo", name.removeprefix("dynamo-")
    if name not in ENGINE_NAMES or host not in ("vllm", "sglang", "trtllm"):
        raise UsageError(f"--engine {engine}: no such engine.", hint=f"Known: {', '.join(ENGINE_NAMES)}.")
    if version and not release(version):
        raise UsageError(
            f"--engine-version {version}: not a version number.", hint="Write what the engine prints, e.g. 0.20.1."
        )
    entry = None if native else image_for(device, name)
    facts = load_topic("runtimes")["engine"][name]
    chosen = image or (entry["image"] if entry else "")
    oldest = entry["min_version"] if entry and not image else facts["oldest"]
    return Runtime(
        engine=name,
        version=version or _tag_version(image),
        oldest=oldest,
        image=chosen,
        ipc_host=bool(entry and entry["ipc_host"]),
        host_engine=host if name == "dynamo" else name,
        source=entry["source"] if entry and not image else facts["source"],
        speculating=speculating,
    )


def image_for(device: Device, engine: str) -> dict[str, str] | None:
    """The table's image for this device, engine and L4T."""
    if device.kind != "jetson":
        return None
    major = release(device.l4t)[:1] or (0,)
    for entry in load_topic("runtimes")["image"]:
        fits = entry["engine"] == engine and device.family in entry["families"]
        if fits and entry.get("l4t_min", 0) <= major[0] < entry.get("l4t_below", 1000):
            return dict(entry)
    return None


def _tag_version(image: str) -> str:
    """The version in an image's tag (``vllm/vllm-openai:v0.27.1``), where it is the engine's own."""
    tag = image.rpartition(":")[2] if image.startswith("vllm/vllm-openai:") else ""
    return ".".join(map(str, release(tag))) if release(tag) else ""


def engine_gate(runtime: Runtime) -> str:
    """The version that decides about fields: the pinned engine's inside Dynamo (V5), else the runtime's own."""
    if runtime.engine != "dynamo":
        return runtime.gate
    pins = load_topic("runtimes")["pins"]["dynamo"]
    known = pins.get(runtime.version) or pins.get(runtime.oldest) or {}
    return str(known.get(runtime.host_engine, ""))


def _local_refusal(runtime: Runtime, model: Model) -> Refusal | None:
    """The embedded engine reads Llama-like dense models only (E6)."""
    if runtime.engine != "local" or model.model_type in LOCAL_MODEL_TYPES:
        return None
    why = f"The embedded engine reads {', '.join(LOCAL_MODEL_TYPES)}, not {model.model_type or model.architecture}."
    return Refusal(method="all", rule="E6", why=why, instead=("--engine llamacpp", "--engine vllm"))


def runtime_refusal(device: Device, runtime: Runtime, model: Model) -> Refusal | None:
    """Why nothing can be planned with this runtime on this device, or None."""
    if device.kind != "jetson":
        return _local_refusal(runtime, model)
    if device.family == "thor" and "jetson-orin" in runtime.image:
        return Refusal(
            method="all",
            rule="C4",
            why=f"{runtime.image} is built for Orin (compute capability 8.7); Thor has {device.compute_capability}.",
            instead=("image vllm/vllm-openai:latest with --entrypoint vllm",),
        )
    if runtime.engine in ("trtllm", "dynamo"):
        names = {"trtllm": "TensorRT-LLM's server", "dynamo": "Dynamo"}
        return Refusal(
            method="all",
            rule="E1",
            why=f"{names[runtime.engine]} is not made for Jetson.",
            instead=("--engine vllm", "TensorRT Edge-LLM for a TensorRT path on Jetson"),
        )
    if runtime.engine == "sglang" and device.family != "thor":
        return Refusal(
            method="all",
            rule="E1",
            why="There is no SGLang image for Orin.",
            instead=("--engine vllm", "--engine llamacpp"),
        )
    upstream = device.family == "thor" or (release(device.l4t)[:1] or (0,))[0] >= 39
    if runtime.engine == "vllm" and upstream and runtime.version and not at_least(runtime.version, "0.20"):
        return Refusal(
            method="all",
            rule="C4",
            why=f"{device.name} with L4T {device.l4t} needs vLLM 0.20 or newer, not {runtime.version}.",
            instead=("image vllm/vllm-openai:latest with --entrypoint vllm",),
        )
    return None
