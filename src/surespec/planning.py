"""From what a user says to a ``Plan``: gathers the facts (I/O), then calls the pure planner; ``tune`` uses it too."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surespec.errors import UsageError
from surespec.memory import system_use
from surespec.models import resolve
from surespec.plan import brought, plan, runtime_for
from surespec.plan.runtime import default_engine
from surespec.plan_nouns import Device, Plan, PlanOptions, Runtime
from surespec.probe import Endpoint, find_device, installed_engines, llamacpp_has_old_flags, probe_endpoint
from surespec.recipe import Recipe

RECIPE_FACTS = (
    "engine",
    "engine_version",
    "image",
    "model",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "speculates",
)


@dataclass(frozen=True)
class PlanRequest:
    """What was asked. Empty fields are filled from the recipe, then the running server, then this machine, then the
    tables. ``options`` holds what was said explicitly; its None fields may be filled too."""

    model: str = ""
    device: str = ""
    l4t: str = ""
    root: Path | None = None
    engine: str = ""
    engine_version: str = ""
    image: str = ""
    endpoint: str = ""
    recipe: Recipe | None = None
    drafter: str = ""
    offline: bool = False
    options: PlanOptions = field(default_factory=PlanOptions)


def make_plan(request: PlanRequest) -> Plan:
    """The plan for a request. Raises UsageError, ModelError, FetchError, EndpointError, InputFileError."""
    facts = recipe_facts(request.recipe)
    server = probe_endpoint(request.endpoint) if request.endpoint else None
    name = request.model or facts.get("model", "") or (server.model if server else "")
    if not name:
        raise UsageError("plan: no model.", hint="Give --model, --recipe or --endpoint.")
    device = find_device(request.device, request.l4t, request.root)
    if server is not None and device.unified and not device.reclaimable_bytes:
        device = _with_running_server(device)
    runtime = _runtime(request, facts, server, device)
    target = resolve(name, offline=request.offline)
    given = (
        [brought(resolve(request.drafter, offline=request.offline, flag="--drafter"), target)]
        if request.drafter
        else None
    )
    return plan(device, runtime, target, _options(request, facts, server, runtime), drafters=given)


def recipe_facts(recipe: Recipe | None) -> dict[str, Any]:
    """What a recipe says that planning needs (``RECIPE_FACTS``); empty without one."""
    if recipe is None:
        return {}
    values = {name: getattr(recipe, name, None) for name in RECIPE_FACTS}
    return {name: value for name, value in values.items() if value not in (None, "")}


def _runtime(request: PlanRequest, facts: dict[str, Any], server: Endpoint | None, device: Device) -> Runtime:
    """The user's word first, then the recipe's, then the server's, then what is installed here."""
    engine = request.engine or facts.get("engine", "") or (server.engine if server else "")
    engine = engine or ("dynamo" if request.options.kubernetes else "")
    image = request.image or facts.get("image", "")
    elsewhere = bool(request.device or request.root or image)
    native = "" if elsewhere else installed_engines().get(engine or default_engine(device), "")
    version = request.engine_version or facts.get("engine_version", "") or (server.version if server else "")
    return runtime_for(
        device,
        engine,
        version or (native if native[:1].isdigit() else ""),
        image,
        native=bool(native),
        speculating=bool(facts.get("speculates") or (server and server.speculating)),
    )


def _options(request: PlanRequest, facts: dict[str, Any], server: Endpoint | None, runtime: Runtime) -> PlanOptions:
    asked = request.options
    update: dict[str, Any] = {
        name: facts[name]
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
        if getattr(asked, name) is None and name in facts
    }
    if asked.kv_cache_dtype == "auto" and "kv_cache_dtype" in facts:
        update["kv_cache_dtype"] = facts["kv_cache_dtype"]
    if asked.max_model_len is None and "max_model_len" not in facts and server is not None and server.max_model_len:
        update["max_model_len"] = server.max_model_len
    if asked.tensor_parallel == 1 and facts.get("tensor_parallel_size"):
        update["tensor_parallel"] = facts["tensor_parallel_size"]
    if runtime.engine == "llamacpp" and not (request.device or request.root):
        program = installed_engines().get("llamacpp", "")
        update["old_llamacpp_flags"] = bool(program) and llamacpp_has_old_flags(program)
    update["already_speculates"] = asked.already_speculates or runtime.speculating
    return asked.model_copy(update=update)


def _with_running_server(device: Device) -> Device:
    """On shared memory without figures a program, what is missing beyond the system's own use is the server's (M7)."""
    free = device.available_bytes if device.available_bytes is not None else device.memory_bytes
    held = max(0, device.memory_bytes - system_use(device) - free)
    return device.model_copy(update={"reclaimable_bytes": held})
