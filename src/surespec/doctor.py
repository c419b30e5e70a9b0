"""What is missing on this machine, and the command that mends it (``surespec doctor``). Reads only.

Each check answers one question that a first run would otherwise answer with a failure. Something *required* that is
missing makes the exit code 1; what is only useful is named with its command and does not.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal

from surespec.core import Noun
from surespec.engines.containers import PROGRAMS, ask
from surespec.engines.existing import find_existing
from surespec.engines.llamacpp import find_build
from surespec.engines.python_env import find_env
from surespec.errors import EngineError, SurespecError, UsageError
from surespec.fetch import cache_dir, known_models
from surespec.plan.runtime import image_for
from surespec.plan_nouns import GIB, Device
from surespec.probe import find_device
from surespec.rules import load_topic

Status = Literal["ok", "missing", "warning", "absent"]
"""``missing`` is required and not there; ``warning`` will hurt; ``absent`` is optional and not there."""

_IMPORTS = ("aiohttp", "numpy", "onnx", "onnxruntime", "pydantic", "scipy", "tokenizers")
_INSTALL = 'python3 -m venv .venv && .venv/bin/pip install . && export PATH="$PWD/.venv/bin:$PATH"'


class Check(Noun):
    """One question. ``found`` says what is there, ``fix`` is the command (or the step) that mends it."""

    name: str
    status: Status
    found: str
    fix: str = ""


class Diagnosis(Noun):
    """The document of ``surespec doctor`` (schema ``surespec/doctor/1``). ``ok``: nothing required is missing."""

    ok: bool
    device: str
    checks: tuple[Check, ...]

    @property
    def exit_code(self) -> int:
        """0 when nothing required is missing, else 1."""
        return 0 if self.ok else 1

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {"schema": "surespec/doctor/1", **self.model_dump(mode="json")}


def examine(engine: str = "") -> Diagnosis:
    """Look at everything; with ``engine``, that engine is required too. Raises UsageError for an unknown one."""
    engines = load_topic("doctor")["engine"]
    if engine and engine not in (*engines, "local"):
        raise UsageError(f"--engine {engine}: doctor does not know it.", hint=f"Known: local, {', '.join(engines)}.")
    device = find_device()
    checks = [
        *_python(),
        *_packages(),
        *_model(),
        *_room(device),
        *_device(device),
        *(_engine(name, entry, device, required=name == engine) for name, entry in engines.items()),
        *_containers(device),
        *_running(),
        *_token(),
    ]
    return Diagnosis(ok=all(c.status != "missing" for c in checks), device=device.name, checks=tuple(checks))


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.platform == "linux":
        yield Check(name="Python", status="ok", found=f"{version} on Linux")
    else:
        yield Check(name="Python", status="warning", found=f"{version} on {sys.platform}; surespec is made for Linux")


def _packages() -> Iterator[Check]:
    """Whether what surespec stands on can be imported: a broken wheel shows here, not in the middle of a run."""
    broken = {name: reason for name in _IMPORTS if (reason := _why_not(name))}
    if broken:
        name, reason = next(iter(broken.items()))
        fix = f"{sys.executable} -m pip install --force-reinstall {' '.join(broken)}"
        yield Check(name="packages", status="missing", found=f"{name} cannot be imported: {reason}", fix=fix)
        return
    own = metadata.version("surespec") if _installed("surespec") else "a checkout"
    yield Check(name="packages", status="ok", found=f"surespec {own}, onnxruntime {metadata.version('onnxruntime')}")
    script = Path(sysconfig.get_path("scripts")) / "surespec"
    on_path = shutil.which("surespec")
    if on_path is None:
        fix = f'export PATH="{script.parent}:$PATH"' if script.is_file() else _INSTALL
        yield Check(name="command", status="warning", found="surespec is not on PATH", fix=fix)
    else:
        yield Check(name="command", status="ok", found=on_path)


def _why_not(module: str) -> str:
    """Why a package cannot be imported, in a line; empty when it can."""
    try:
        import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    return ""


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _model() -> Iterator[Check]:
    for name, asset in known_models().items():
        path = cache_dir() / name / asset.file
        if path.is_file() and path.stat().st_size == asset.size_bytes:
            yield Check(name="small model", status="ok", found=f"{name} in {path.parent}")
        else:
            found = f"{name} ({asset.size_bytes / 1e6:.0f} MB) is not here yet; needed by the embedded engine only"
            yield Check(name="small model", status="absent", found=found, fix=f"surespec fetch {name}")


def _room(device: Device) -> Iterator[Check]:
    need, place = load_topic("doctor")["room"], _nearest_folder(cache_dir())
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        fix = "export SURESPEC_CACHE=/a/folder/of/yours"
        yield Check(name="cache folder", status="missing", found=f"{place} cannot be written", fix=fix)
    elif free < need["cache_bytes"]:
        fix = "export SURESPEC_CACHE=/a/folder/with/room"
        yield Check(name="disk", status="missing", found=f"{free / 1e9:.1f} GB free at {place}", fix=fix)
    else:
        yield Check(name="disk", status="ok", found=f"{free / 1e9:.1f} GB free for models at {place}")
    if device.available_bytes is None:
        return
    free_memory = f"{device.available_bytes / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB free"
    if device.available_bytes < need["memory_bytes"]:
        fix = "Stop what holds it: ps aux --sort=-rss | head"
        yield Check(name="memory", status="warning", found=free_memory, fix=fix)
    else:
        yield Check(name="memory", status="ok", found=free_memory)


def _nearest_folder(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


def _device(device: Device) -> Iterator[Check]:
    about = ", ".join(p for p in (device.name, f"L4T {device.l4t}" if device.l4t else "", device.power_mode) if p)
    if device.power_mode and not device.power_mode.upper().startswith("MAXN"):
        yield Check(name="device", status="warning", found=f"{about}: not at full power (G8)", fix="sudo nvpmodel -m 0")
    else:
        yield Check(name="device", status="ok", found=about)
    for warning in device.warnings:
        yield Check(name="device", status="warning", found=warning)


def _engine(name: str, entry: dict[str, Any], device: Device, *, required: bool) -> Check:
    """Whether an engine can be launched natively, found as ``tune`` will find it."""
    try:
        return Check(name=entry["title"], status="ok", found=_engine_found(name, entry))
    except SurespecError as error:
        found = error.message
    if device.kind == "jetson" and (image := _image(device, name)):
        fix = f"docker pull {image}"
    else:
        fix = entry["install_gpu" if device.kind in ("gpu", "unified", "jetson") else "install_cpu"]
    return Check(name=entry["title"], status="missing" if required else "absent", found=found, fix=fix)


def _engine_found(name: str, entry: dict[str, Any]) -> str:
    """Version or place of an engine. Raises ConfigError for a bad variable, EngineError when there is none."""
    if name == "llamacpp":
        return str(find_build().program)
    if "distributions" in entry:
        env = find_env(name, entry["distributions"])
        return f"{env.version}, {env.python}"
    program: str | None = shutil.which(entry["program"])
    if program is None:
        raise EngineError(f"There is no {entry['title']} here.")
    return program


def _image(device: Device, engine: str) -> str:
    """The container image of the rule table for this Jetson, empty when there is none."""
    entry: dict[str, str] | None = image_for(device, engine)
    return entry.get("image", "") if entry else ""


def _containers(device: Device) -> Iterator[Check]:
    programs = [name for name in PROGRAMS if shutil.which(name)]
    if not programs:
        fix = "sudo apt-get install -y docker.io" if device.kind == "jetson" else ""
        why = "no docker and no podman; needed only for recipes that start containers"
        yield Check(name="containers", status="absent", found=why, fix=fix)
        return
    for name in programs:
        version = ask([name, "version", "--format", "{{.Server.Version}}"]).strip()
        if version:
            yield Check(name="containers", status="ok", found=f"{name} {version}")
            continue
        running = "sudo systemctl start docker" if not Path("/var/run/docker.sock").exists() else ""
        fix = running or 'sudo usermod -aG docker "$USER" && newgrp docker'
        yield Check(name="containers", status="warning", found=f"{name} is here but does not answer", fix=fix)


def _running() -> Iterator[Check]:
    servers = find_existing()
    for server in servers:
        found = f"{server.label} is running; a device carries one model at a time"
        yield Check(name="running server", status="warning", found=found, fix="surespec tune ... --stop-existing")
    if not servers:
        yield Check(name="running server", status="ok", found="none, so tune may launch")


def _token() -> Iterator[Check]:
    """Whether gated models can be had. The token's value is never read further than whether it is there."""
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    given = [name for name in names if os.environ.get(name)]
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    if given or (home / "token").is_file():
        yield Check(name="Hugging Face", status="ok", found=f"a token is set ({given[0] if given else 'its own file'})")
    else:
        found = "no token; needed only for gated models such as meta-llama's"
        yield Check(name="Hugging Face", status="absent", found=found, fix="hf auth login")


__all__ = ["Check", "Diagnosis", "examine"]
