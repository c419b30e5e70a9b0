"""Device, runtime, model and what the user asked for -> ranked arms, refusals by rule, memory, commands. Pure.

The order: may this engine run here at all (C4, E1); does the target fit (M2); is the board too small (W4) or full (W3);
then for every drafter known: the engine has the method (V2 to V5), serves this head, the load allows it (W3), the draft
is small enough (H7), no known bug stops it. What passes becomes an arm; what does not is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from surespec import memory
from surespec.models.bundled import bundled, bundled_ids, variants_of
from surespec.plan.arms import Sizing, baseline_command, make_arm, rank
from surespec.plan.gates import (
    LOAD_CONCURRENCY,
    Place,
    ceiling,
    draft_size,
    drafter_engine,
    engine_method,
    known_bug,
    load_only,
    small_board,
)
from surespec.plan.heads import NGRAM, draft_for, heads_for, mtp_for
from surespec.plan.notes import plan_notes
from surespec.plan.runtime import engine_gate, runtime_for, runtime_refusal
from surespec.plan.tuning import DEFAULT_BATCHED_TOKENS, DEFAULT_SEQS, schedule_problem
from surespec.plan_nouns import GIB, Device, Drafter, Model, Plan, PlannedArm, PlanOptions, Refusal, Runtime

_HEADS_PER_METHOD = 2


def plan(
    device: Device,
    runtime: Runtime,
    model: Model,
    options: PlanOptions | None = None,
    *,
    drafters: Sequence[Drafter] | None = None,
) -> Plan:
    """The plan. ``drafters`` replaces what the tables know (a head or draft the user brings)."""
    options = options or PlanOptions()
    uses_share = runtime.engine in ("vllm", "sglang", "trtllm", "dynamo") and device.kind != "cpu"
    utilization = (options.gpu_memory_utilization or device.default_utilization) if uses_share else None
    place = Place(device, runtime, model, options, utilization, engine_gate(runtime))
    sizing = _sizing(place)
    baseline = memory.budget(device, sizing.settings)
    refused: list[Refusal] = []
    arms: list[PlannedArm] = []
    stop = runtime_refusal(device, runtime) or small_board(place, _alternatives(place, sizing)) or ceiling(place)
    stop = stop or _target_too_big(place, sizing, baseline)
    if stop is not None:
        refused.append(stop)
    else:
        for drafter in _candidates(place, drafters, refused):
            _consider(place, sizing, drafter, arms, refused)
    return Plan(
        device=device,
        runtime=runtime,
        model=model,
        kv_bytes_per_token=memory.kv_bytes_per_token(model, options.kv_cache_dtype),
        baseline=baseline,
        baseline_command=baseline_command(place, sizing) if runtime_refusal(device, runtime) is None else "",
        gpu_memory_utilization=utilization or 0.0,
        max_model_len=sizing.settings.max_model_len,
        arms=rank(arms),
        refused=tuple(refused),
        notes=plan_notes(place, baseline, arms, refused),
    )


def _sizing(place: Place) -> Sizing:
    options, model, device = place.options, place.model, place.device
    length = options.max_model_len or device.default_max_model_len
    if model.max_position_embeddings:
        length = min(length, model.max_position_embeddings)
    few = place.runtime.engine in ("llamacpp", "local")
    settings = memory.Settings(
        model=model,
        utilization=place.utilization,
        max_model_len=length,
        max_num_seqs=options.max_num_seqs or (max(options.concurrency) if few else DEFAULT_SEQS),
        batched_tokens=options.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
        concurrency=max(options.concurrency),
        tokens_per_request=options.tokens_per_request,
        kv_dtype=options.kv_cache_dtype,
        tensor_parallel=options.tensor_parallel,
    )
    return Sizing(settings, _usable_variants(device, model))


def _usable_variants(device: Device, model: Model) -> tuple[Model, ...]:
    """Other checkpoints of the model in a precision the device computes in."""
    needs = {"nvfp4": device.fp4, "mxfp4": True, "fp8": device.fp8}
    return tuple(v for v in variants_of(model) if needs.get(v.quantization, True))


def _alternatives(place: Place, sizing: Sizing) -> tuple[str, ...]:
    """Up to three checkpoints that fit this device without speculation: of this model first, then smaller ones."""
    device = place.device
    highest = memory.highest_utilization(device)
    family = place.model.model_type[:4]
    others = [m for m in (bundled(i) for i in bundled_ids()) if m is not None and m.model_type[:4] == family]
    smaller = [m for m in others if m.weight_bytes < place.model.weight_bytes]
    ordered = [*sizing.variants, *sorted(smaller, key=lambda m: -m.weight_bytes)]
    found: dict[str, str] = {}
    for candidate in ordered:
        if candidate.quantization in ("nvfp4", "fp8") and not device.fp8:
            continue
        settings = _with_model(sizing.settings, candidate, highest)
        if candidate.weight_bytes < place.model.weight_bytes and memory.budget(device, settings).fits:
            size = candidate.weight_bytes / GIB
            found.setdefault(
                candidate.id, f"serve {candidate.id} ({candidate.quantization}, {size:.1f} GiB), a smaller or better-quantised model"
            )
    return tuple(found.values())[:3]


def _with_model(settings: memory.Settings, model: Model, utilization: float) -> memory.Settings:
    from dataclasses import replace

    share = settings.utilization
    return replace(settings, model=model, utilization=None if share is None else max(share, utilization), concurrency=1, max_num_seqs=4)


def _target_too_big(place: Place, sizing: Sizing, baseline: object) -> Refusal | None:
    """M2: the target does not fit, not even with a shorter context, fp8 KV or another utilization."""
    budget = memory.budget(place.device, sizing.settings)
    if budget.fits or memory.smallest_changes(place.device, sizing.settings) is not None:
        return None
    changes = memory.smallest_changes(place.device, sizing.settings, sizing.variants)
    instead = [f"{change.flag} {change.value}: {change.why}" for change in changes or ()]
    if not changes:
        instead = [*_alternatives(place, sizing)]
    weights = place.model.weight_bytes / place.options.tensor_parallel / GIB
    why = f"{place.model.id} needs {weights:.1f} GiB for its weights alone; {place.device.name} has {budget.total / GIB:.1f} GiB"
    if budget.short_of == "admission":
        why += f" of which {budget.available / GIB:.1f} GiB are free now (stop what runs there first)"
    else:
        why += f" and the engine may take {budget.requested / GIB:.1f} GiB of it"
    return Refusal(
        method="all",
        rule="M2",
        why=f"{why}.",
        instead=(*instead, "more GPUs (--tensor-parallel)" if place.device.gpus > 1 else "memory tuning (F4)"),
    )


def _candidates(place: Place, given: Sequence[Drafter] | None, refused: list[Refusal]) -> list[Drafter]:
    """Every drafter worth a look, best first; what is missing is said."""
    if given is not None:
        return list(given)
    heads = heads_for(place.model)
    found: list[Drafter] = list(heads)
    own = mtp_for(place.model)
    if own is not None:
        found.append(own)
    draft, why = draft_for(place.model)
    if draft is not None:
        found.append(draft)
    else:
        refused.append(Refusal(method="draft_model", rule="H4", why=f"{place.model.id}: {why}.", instead=("bring one of the same tokenizer",)))
    if not any(d.method == "eagle3" for d in heads):
        offers = ([f"draft_model with {draft.id} (C2)"] if draft else []) + ["ngram, for answers that repeat the prompt (E5)"]
        refused.append(
            Refusal(
                method="eagle3",
                rule="W3",
                why=f"No published EAGLE-3 head is known for {place.model.id}; training one is no quick fix.",
                instead=tuple(offers),
            )
        )
    found.append(NGRAM)
    return found


def _consider(
    place: Place, sizing: Sizing, drafter: Drafter, arms: list[PlannedArm], refused: list[Refusal]
) -> None:
    """One drafter through the gates: an arm (and its dynamic twin), or a refusal."""
    for gate in (engine_method(place, drafter.method), drafter_engine(place, drafter), known_bug(place, drafter), draft_size(place, drafter)):
        if gate is not None:
            if gate not in refused:
                refused.append(gate)
            return
    same = [arm for arm in arms if arm.method == drafter.method and _plain(arm)]
    limit = _HEADS_PER_METHOD if drafter.method == "eagle3" and not drafter.parallel_drafting else 1
    if len([a for a in same if bool(a.drafter and a.drafter.parallel_drafting) == drafter.parallel_drafting]) >= limit:
        return
    suffix = drafter.id.split("/")[0].lower() if same and not drafter.parallel_drafting else ""
    overload = load_only(place, drafter.method)
    can_vary = not schedule_problem(place) and drafter.method in ("eagle3", "mtp", "draft_model") and not same
    if overload is not None:
        if overload not in refused:
            refused.append(overload)
        if can_vary or (not place.runtime.version and drafter.method == "eagle3" and not same and place.runtime.engine == "vllm"):
            arms.append(make_arm(place, sizing, drafter, dynamic=True, suffix=suffix))
        return
    arms.append(make_arm(place, sizing, drafter, suffix=suffix))
    busy = max(place.options.concurrency) >= LOAD_CONCURRENCY
    if busy and can_vary and place.engine_version and drafter.method == "eagle3":
        arms.append(make_arm(place, sizing, drafter, dynamic=True, suffix=suffix))


def _plain(arm: PlannedArm) -> bool:
    return "num_speculative_tokens_per_batch_size" not in arm.speculative_config


__all__ = ["plan", "runtime_for"]
