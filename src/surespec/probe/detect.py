"""This machine -> ``Device``: Jetson boards from the device tree, GPUs from nvidia-smi, else the CPU.

Recognition follows jetson-device-skills' detect_jetson.sh (order of names, size cut-offs, TNSPEC for Thor) and
jetson-containers (``/tmp/nv_jetson_model`` stands in for the device tree inside a container).
"""

from __future__ import annotations

import re

from surespec.dialects.versions import release
from surespec.plan_nouns import GIB, Device
from surespec.probe.machine import Machine
from surespec.probe.table import cpu_device, gpu_by_name, jetpack, table_device

MIB = 2**20
BUSY_BYTES = GIB
_BOARDS = (
    ("thor", "thor"),
    ("orin nano", "orin-nano"),
    ("orin nx", "orin-nx"),
    ("agx orin", "agx-orin"),
    ("orin", "agx-orin"),
)
# family -> (smallest whole GiB the system sees, sku), largest first
_SIZES: dict[str, tuple[tuple[int, str], ...]] = {
    "thor": ((96, "thor-t5000"), (0, "thor-t4000")),
    "agx-orin": ((56, "orin-agx-64gb"), (0, "orin-agx-32gb")),
    "orin-nx": ((14, "orin-nx-16gb"), (0, "orin-nx-8gb")),
    "orin-nano": ((6, "orin-nano-8gb"), (0, "orin-nano-4gb")),
}


def detect(machine: Machine) -> Device:
    """The device of this machine (live or captured)."""
    total, available = memory_of(machine)
    device = _jetson(machine, total, available) or _gpu(machine, total, available) or _cpu(machine, total, available)
    update: dict[str, object] = {"in_container": in_container(machine)}
    held = held_by_programs(machine) if device.kind in ("jetson", "unified") else device.reclaimable_bytes
    if held > BUSY_BYTES:
        warning = (
            f"M7: {held / GIB:.1f} GiB are held by GPU programs now; a plan counts them as free, so stop those first."
        )
        update |= {"reclaimable_bytes": held, "warnings": (*device.warnings, warning)}
    return device.model_copy(update=update)


def held_by_programs(machine: Machine) -> int:
    """Bytes that GPU programs hold on shared memory, where the driver says so (Thor, GB10; not Orin)."""
    values = [_mib(line) for line in machine.output("nvidia-smi-apps.csv").splitlines()]
    return sum(value for value in values if value is not None)


def memory_of(machine: Machine) -> tuple[int, int | None]:
    """Total and available bytes of the system, a container's limit respected; (0, None) when nothing can be read."""
    text = machine.read("/proc/meminfo")
    total, available = _meminfo(text, "MemTotal"), _meminfo(text, "MemAvailable")
    if not machine.captured and not total:
        import psutil

        memory = psutil.virtual_memory()
        total, available = memory.total, memory.available
    limit = machine.read("/sys/fs/cgroup/memory.max") or machine.read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    if limit.isdigit() and len(limit) < 20 and 0 < int(limit) < (total or 0):
        used = machine.read("/sys/fs/cgroup/memory.current") or machine.read(
            "/sys/fs/cgroup/memory/memory.usage_in_bytes"
        )
        total = int(limit)
        free = total - int(used) if used.isdigit() and len(used) < 20 else total
        available = max(0, min(available if available is not None else free, free))
    return total or 0, available


def _meminfo(text: str, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def in_container(machine: Machine) -> bool:
    """True inside Docker, Podman or Kubernetes."""
    if machine.exists("/.dockerenv") or machine.exists("/run/.containerenv"):
        return True
    return any(word in machine.read("/proc/1/cgroup") for word in ("docker", "kubepods", "containerd"))


def l4t_of(machine: Machine) -> str:
    """The L4T release: ``# R38 (release), REVISION: 4.0`` -> 38.4.0, else the package's version; empty when unknown."""
    found = re.search(r"R(\d+)\s*\(release\)\s*,\s*REVISION:\s*([\d.]+)", machine.read("/etc/nv_tegra_release"))
    if found:
        return f"{found[1]}.{found[2].rstrip('.')}"
    return ".".join(str(n) for n in release(machine.output("dpkg-l4t.txt").split("-")[0]))


def power_mode_of(machine: Machine) -> str:
    """The name of the power mode (``MAXN``, ``30W``); empty when it cannot be read."""
    found = re.search(r"NV Power Mode:\s*(\S+)", machine.output("nvpmodel.txt"))
    return found[1] if found else ""


def _jetson(machine: Machine, total: int, available: int | None) -> Device | None:
    model = (machine.read("/proc/device-tree/model") or machine.read("/tmp/nv_jetson_model")).lower()
    l4t = l4t_of(machine)
    if not re.search(r"jetson|\borin\b|\bthor\b", model):
        model = _board_by_gpu(machine, total)
        if not model:
            return None
    family = next((family for text, family in _BOARDS if text in model), "jetson-other")
    warnings: list[str] = []
    if family == "jetson-other":
        base = table_device("orin-nano-4gb").model_copy(
            update={"sku": "jetson-other", "name": model, "family": family, "memory_gb": round(total / GIB, 1)}
        )
    else:
        base = table_device(_sku(machine, family, total))
    mode = power_mode_of(machine)
    if not mode:
        warnings.append("G8: the power mode could not be read (nvpmodel -q); benchmark only in MAXN.")
    if not l4t:
        warnings.append(
            "C4: the L4T release could not be read; an old one is assumed. Say --l4t, if it is r39 or newer."
        )
    return base.model_copy(
        update={
            "memory_bytes": total or base.memory_bytes,
            "available_bytes": available,
            "l4t": l4t,
            "jetpack": jetpack(l4t) if l4t else "",
            "power_mode": mode,
            "assumed": () if total else base.assumed,
            "warnings": tuple(warnings),
        }
    )


def _board_by_gpu(machine: Machine, total: int) -> str:
    """In a container without the device tree only the GPU's name is left: Thor, or an Orin told apart by its memory."""
    name = machine.output("nvidia-smi.csv").split(",")[0].strip().lower()
    if re.search(r"\bthor\b", name):
        return "thor"
    if not (name.startswith("orin") or name.endswith("(nvgpu)")):
        return ""
    size = round(total / GIB)
    return "agx orin" if size >= 28 else "orin nx" if size >= 14 else "orin nano"


def _sku(machine: Machine, family: str, total: int) -> str:
    """The size variant: Thor's TNSPEC first, then what the system sees."""
    if family == "thor":
        spec = machine.read("/etc/nv_boot_control.conf").lower()
        known = re.search(r"\bt(5000|4000)\b|3834-(?:\d+-)?0008", spec)
        if known:
            return "thor-t4000" if known[1] == "4000" else "thor-t5000"
    size = round(total / GIB)
    return next(sku for floor, sku in _SIZES[family] if size >= floor)


def _gpu(machine: Machine, total: int, available: int | None) -> Device | None:
    rows = [_row(line) for line in machine.output("nvidia-smi.csv").splitlines() if line.strip()]
    rows = [row for row in rows if row and row[0] and not row[0].lower().endswith("(nvgpu)")]
    if not rows:
        return None
    name = rows[0][0]
    gpu_total, used, free = (_mib(value) for value in rows[0][1:4])
    capability = rows[0][4] if re.fullmatch(r"\d+\.\d+", rows[0][4]) else ""
    known = gpu_by_name(name, gpu_total or 0)
    base = known or _unknown_gpu(name, gpu_total or 0, capability)
    unified = base.kind == "unified" or gpu_total is None
    warnings = []
    if unified:
        gpu_total, free = total or base.memory_bytes, available
    if unified and base.kind == "gpu":
        warnings.append(f"{name}: nvidia-smi does not give its memory; the system's is taken.")
    return base.model_copy(
        update={
            "kind": "unified" if unified else "gpu",
            "memory_bytes": gpu_total,
            "memory_gb": base.memory_gb if known else round((gpu_total or 0) / GIB, 1),
            "available_bytes": free,
            "reclaimable_bytes": used if used is not None and not unified else 0,
            "compute_capability": capability or base.compute_capability,
            "gpus": len(rows),
            "assumed": (),
            "warnings": tuple(warnings),
        }
    )


def _row(line: str) -> list[str]:
    cells = [cell.strip() for cell in line.split(",")]
    return [*cells, "", "", "", "", ""][:6]


def _mib(text: str) -> int | None:
    """Bytes of a number of MiB; None for ``[N/A]`` and the like."""
    found = re.match(r"^\s*(\d+(?:\.\d+)?)", text)
    return round(float(found[1]) * MIB) if found else None


def _unknown_gpu(name: str, memory: int, capability: str) -> Device:
    """A GPU outside the table: what its compute capability says about its arithmetic."""
    numbers = release(capability)
    return Device(
        sku="gpu",
        name=name,
        family="gpu",
        kind="gpu",
        memory_gb=round(memory / GIB, 1),
        memory_bytes=memory,
        compute_capability=capability,
        fp8=numbers >= (8, 9),
        fp4=numbers >= (10, 0),
    )


def _cpu(machine: Machine, total: int, available: int | None) -> Device:
    found = re.search(r"^model name\s*:\s*(.+)$", machine.read("/proc/cpuinfo"), re.MULTILINE)
    flags = machine.read("/proc/cpuinfo")
    device = cpu_device(f"CPU only ({found[1].strip()})" if found else "CPU only", total, available)
    warnings = []
    bf16 = not found or "bf16" in flags
    if not bf16:
        warnings.append("This CPU emulates bfloat16: vLLM needs --dtype float32 there, or speculation cannot win.")
    return device.model_copy(update={"warnings": tuple(warnings), "bf16": bf16})
