"""Devices of ``rules/devices.toml``, simulated or recognised, and what an L4T release means."""

from __future__ import annotations

import difflib

from surespec.dialects.versions import release
from surespec.errors import UsageError
from surespec.plan_nouns import GIB, Device
from surespec.rules import load_topic

MIB = 2**20


def device_ids() -> tuple[str, ...]:
    """The ids of the table."""
    return tuple(load_topic("devices"))


def table_device(sku: str) -> Device:
    """The device of that id as the table has it. Raises UsageError with the nearest ids."""
    table = load_topic("devices")
    entry = table.get(sku.lower())
    if entry is None:
        near = difflib.get_close_matches(sku.lower(), table, n=4, cutoff=0.4) or list(table)
        raise UsageError(f"--device {sku}: no such device in the table.", hint=f"Known: {', '.join(near)}.")
    assumed = ("memory size",) if str(entry["visible_source"]).startswith("estimated") else ()
    return Device(
        sku=sku.lower(),
        name=entry["name"],
        family=entry["family"],
        kind=entry["kind"],
        memory_gb=entry["memory_gb"],
        memory_bytes=entry["visible_mib"] * MIB,
        bandwidth_gb_s=entry["bandwidth_gb_s"],
        compute_capability=entry["compute_capability"],
        fp8=entry["fp8"],
        fp4=entry["fp4"],
        default_utilization=entry["utilization"],
        default_max_model_len=entry["max_model_len"],
        assumed=assumed,
    )


def simulated_device(sku: str, l4t: str = "") -> Device:
    """A device of the table without the machine: a board is assumed to run the newest L4T of its table.

    Raises UsageError for an unknown id, for an L4T that is no release number, for r38 on Orin (which it does not
    support), for anything older than r38 on Thor, and for an L4T on a device that has none.
    """
    device = table_device(sku)
    update: dict[str, object] = {"simulated": True}
    assumed = [*device.assumed, "free memory"]
    if device.kind == "jetson":
        newest = load_topic("devices")[device.sku]["newest_l4t"]
        update["l4t"] = parse_l4t(l4t) if l4t else newest
        if not l4t:
            assumed.append(f"L4T {newest} (the newest known for it; say --l4t for another)")
        check_l4t(device.family, str(update["l4t"]))
        update["jetpack"] = jetpack(str(update["l4t"]))
    elif l4t:
        raise UsageError(f"--l4t {l4t}: {device.name} does not run L4T.", hint="Leave --l4t out.")
    return device.model_copy(update={**update, "assumed": tuple(assumed)})


def parse_l4t(text: str) -> str:
    """``36.4.3``, ``r36.4.3`` or ``R36.4`` -> ``36.4.3``. Raises UsageError."""
    cleaned = text.strip().lower().removeprefix("l4t").strip(" -_").removeprefix("r")
    numbers = release(cleaned)
    if not numbers or not 30 <= numbers[0] < 100:
        raise UsageError(
            f"--l4t {text}: not an L4T release.", hint="Write it as in /etc/nv_tegra_release, e.g. 36.4.3 or 39.2."
        )
    return ".".join(str(n) for n in numbers)


def check_l4t(family: str, l4t: str) -> None:
    """Raises UsageError when the release does not exist for the family."""
    major = release(l4t)[:1]
    if family == "thor" and major and major[0] < 38:
        raise UsageError(f"--l4t {l4t}: Thor starts with L4T 38.", hint="Use 38.2, 38.4 or 39.2.")
    if family.endswith(("orin", "nx", "nano")) and major == (38,):
        raise UsageError(f"--l4t {l4t}: r38 does not support Orin.", hint="Use 36.4.x, 36.5 or 39.2.")


def jetpack(l4t: str) -> str:
    """The JetPack of an L4T release; empty when the table does not have it."""
    table = load_topic("runtimes")["jetpack"]
    numbers = release(l4t)
    best = ""
    for known in table:
        prefix = release(known)
        if numbers[: len(prefix)] == prefix and len(prefix) >= len(release(best)):
            best = known
    return str(table[best]) if best else ""


def gpu_by_name(name: str, memory_bytes: int) -> Device | None:
    """The table's GPU whose name is the longest one found in ``name`` (as whole words), nearest in memory."""
    words = " ".join(name.lower().replace("-", " ").split())
    found: list[tuple[int, int, str]] = []
    for sku, entry in load_topic("devices").items():
        distance = abs(entry["visible_mib"] * MIB - memory_bytes)
        found += [(-len(text), distance, sku) for text in entry.get("match", ()) if f" {text} " in f" {words} "]
    return table_device(min(found)[2]) if found else None


def cpu_device(name: str, memory_bytes: int, available: int | None) -> Device:
    """A machine without an accelerator, with its own memory size."""
    base = table_device("cpu")
    update = {"name": name or base.name, "memory_bytes": memory_bytes, "memory_gb": round(memory_bytes / GIB, 1)}
    return base.model_copy(update={**update, "available_bytes": available, "bandwidth_gb_s": None})
