"""What is not planned, and by which rule. Each gate looks at one thing and says why and what instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surespec.dialects import methods_of
from surespec.dialects import vllm as vllm_dialect
from surespec.dialects.versions import at_least, at_most, release
from surespec.memory import UTILIZATION_CEILING
from surespec.plan_nouns import GIB, Device, Drafter, Model, PlannedArm, PlanOptions, Refusal, Runtime
from surespec.rules import load_topic

LOAD_CONCURRENCY = 8
JETSON_FAMILIES = ("thor", "agx-orin")
MAX_DRAFT_SHARE = 0.5
FLAGGED_DRAFT_SHARE = 0.25


@dataclass(frozen=True)
class Place:
    """Where an arm would run: everything a gate may look at."""

    device: Device
    runtime: Runtime
    model: Model
    options: PlanOptions
    utilization: float | None
    engine_version: str


def small_board(place: Place, alternatives: Sequence[str]) -> tuple[Refusal, ...]:
    """W4: of the Jetsons only Thor and AGX Orin; never EAGLE-3 on Orin NX and Orin Nano. One refusal a method."""
    device = place.device
    if device.kind != "jetson" or device.family in JETSON_FAMILIES:
        return ()
    shared = f"{device.name} has {device.memory_gb:g} GB for the system, the target and every cache"
    free = "free memory first (jetson-inference-mem-tune, jetson-headless-mode), then serve without speculation"
    instead = (*alternatives, free)
    by_hand = "by hand, with llama.cpp: --spec-type ngram-simple, for answers that repeat the prompt"
    return (
        Refusal(method="eagle3", rule="W4", why=f"{shared}; an EAGLE-3 head runs it out of memory.", instead=instead),
        Refusal(
            method="draft_model", rule="W4", why=f"{shared}; a second model does not fit beside it.", instead=instead
        ),
        Refusal(
            method="ngram",
            rule="W4",
            why="Speculation is planned for Thor and AGX Orin only; ngram needs no memory, but it is not proven here.",
            instead=(by_hand,),
        ),
    )


def ceiling(place: Place) -> Refusal | None:
    """W3: on shared memory nothing is added while the utilization is at its ceiling."""
    if place.utilization is None or not place.device.unified or place.options.already_speculates:
        return None
    if place.utilization < UTILIZATION_CEILING - 1e-9:
        return None
    return Refusal(
        method="all",
        rule="W3",
        why=f"gpu-memory-utilization is {place.utilization:.2f}, at its ceiling of {UTILIZATION_CEILING:.2f}.",
        instead=(
            "free 2 GB or more (jetson-inference-mem-tune), lower gpu-memory-utilization, then plan again",
            "a smaller or better-quantised checkpoint of the model",
        ),
    )


def load_only(place: Place, method: str) -> Refusal | None:
    """W3: a fixed k is not planned where every measured concurrency is 8 or more."""
    if min(place.options.concurrency) < LOAD_CONCURRENCY:
        return None
    return Refusal(
        method=method,
        rule="W3",
        why=f"the least concurrency asked for is {min(place.options.concurrency)}; a fixed k costs throughput there.",
        instead=(
            "k by batch size: num_speculative_tokens_per_batch_size (vLLM 0.24 or newer), measured (K1)",
            "no speculation",
        ),
    )


def engine_method(place: Place, method: str) -> Refusal | None:
    """The engine has the method, and this version of it runs it (V2, V3, V4)."""
    runtime = place.runtime
    if method not in methods_of(runtime.engine, runtime.host_engine):
        return Refusal(method=method, rule="V2", why=f"{runtime.engine} has no {method}.", instead=("--engine vllm",))
    if runtime.engine == "llamacpp" and place.options.old_llamacpp_flags and method != "draft_model":
        why = f"this llama-server has no --spec-type: {method} came with the renamed flags."
        return Refusal(method=method, rule="E4", why=why, instead=("a newer llama.cpp", "draft_model"))
    if runtime.host_engine != "vllm":
        return None
    problem = vllm_dialect.method_problem(method, place.engine_version)
    rule = "V2"
    if not problem and method == "eagle3":
        problem, rule = vllm_dialect.eagle3_target_problem(place.model.model_type, place.engine_version), "V3"
    if not problem:
        return None
    if not runtime.version and runtime.engine == "vllm":
        why = f"the engine's version is not known and may be as old as {place.engine_version}: {problem}."
        return Refusal(method=method, rule="V4", why=why, instead=("say --engine-version, if it is newer",))
    if runtime.engine == "dynamo":
        return Refusal(method=method, rule="V5", why=f"Dynamo pins vLLM {place.engine_version}: {problem}.")
    return Refusal(method=method, rule=rule, why=f"{problem}.", instead=("a newer vLLM", "another method"))


def drafter_engine(place: Place, drafter: Drafter) -> Refusal | None:
    """A head is planned only where an engine is known to serve it, from the version known on."""
    if not drafter.engines:
        return None
    key = place.runtime.host_engine
    if key not in drafter.engines:
        served = ", ".join(drafter.engines)
        return Refusal(
            method=drafter.method,
            rule="V2",
            why=f"{drafter.id} is not known to be served by {key} (known: {served}).",
            instead=tuple(f"--engine {name}" for name in drafter.engines),
        )
    version = place.runtime.version if place.runtime.engine == key else place.engine_version
    floor = drafter.engines[key]
    if release(version) and not at_least(version, floor):
        return Refusal(
            method=drafter.method,
            rule="V2",
            why=f"{drafter.id} needs {key} {floor} or newer, not {version}.",
            instead=(f"{key} {floor} or newer",),
        )
    return None


def draft_size(place: Place, drafter: Drafter) -> Refusal | None:
    """H7: a draft must be much smaller than its target."""
    if drafter.method != "draft_model" or drafter.weight_bytes <= MAX_DRAFT_SHARE * place.model.weight_bytes:
        return None
    return Refusal(
        method="draft_model",
        rule="H7",
        why=(
            f"{drafter.id} reads {drafter.weight_bytes / GIB:.2f} GiB for each drafted token, "
            f"the target {place.model.weight_bytes / GIB:.2f} GiB for a step."
        ),
        instead=("an EAGLE-3 head", "ngram, for answers that repeat the prompt"),
    )


def never_pays(arm: PlannedArm) -> Refusal | None:
    """K4: more than k + 1 tokens a step cannot come."""
    most = arm.num_speculative_tokens + 1
    if arm.break_even_length is None or arm.break_even_length <= most:
        return None
    return Refusal(
        method=arm.method,
        rule="K4",
        why=f"{arm.name} would have to yield {arm.break_even_length:.2f} tokens a step, and {most} is the most it can.",
        instead=("an EAGLE-3 head", "a smaller draft, or a larger target"),
    )


def bugs_for(place: Place, method: str, drafter: Drafter | None) -> tuple[dict[str, Any], ...]:
    """The known problems that apply to this arm here."""
    return tuple(bug for bug in load_topic("known_bugs")["bug"] if _applies(bug, place, method, drafter))


def _applies(bug: dict[str, Any], place: Place, method: str, drafter: Drafter | None) -> bool:
    engines = {place.runtime.engine, place.runtime.host_engine}
    if bug.get("engine") not in (None, *engines) or bug.get("method") not in (None, method):
        return False
    if "families" in bug and place.device.family not in bug["families"]:
        return False
    if bug.get("hybrid") and not place.model.hybrid:
        return False
    if "draft" in bug and (drafter is None or drafter.id != bug["draft"]):
        return False
    version = place.engine_version
    if "since" in bug and not (release(version) and at_least(version, bug["since"])):
        return False
    return not ("until" in bug and release(version) and not at_most(version, bug["until"]))


def known_bug(place: Place, drafter: Drafter) -> Refusal | None:
    """A known problem that stops the arm."""
    for bug in bugs_for(place, drafter.method, drafter):
        if bug["effect"] == "refuse":
            return Refusal(
                method=drafter.method, rule="V2", why=f"{bug['what']} ({bug['source']}).", instead=(bug["fix"],)
            )
    return None
