"""Device, runtime, model and what the user asked for -> ranked arms, refusals by rule, memory, commands. Pure.

The order: may this engine run here at all (C4, E1); does the target fit (M2); is the board too small (W4) or full (W3);
then for every drafter known: the engine has the method (V2 to V5), serves this head, the load allows it (W3), the draft
is small enough (H7), no known bug stops it. What passes becomes an arm; what does not is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surespec import memory
from surespec.fitting import smallest_changes
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
    never_pays,
    small_board,
)
from surespec.plan.guide import quick_start
from surespec.plan.heads import NGRAM, brought, draft_for, heads_for, mtp_for
from surespec.plan.notes import plan_notes
from surespec.plan.runtime import engine_gate, runtime_for, runtime_refusal
from surespec.plan.tuning import DEFAULT_BATCHED_TOKENS, DEFAULT_SEQS, schedule_problem
from surespec.plan_nouns import (
    GIB,
    Device,
    Drafter,
    MemoryBudget,
    Model,
    Plan,
    PlannedArm,
    PlanOptions,
    Refusal,
    Runtime,
)

_HEADS_PER_METHOD = 2


def plan(
    device: Device,
    runtime: Runtime,
    model: Model,
    options: PlanOptions | None = None,
    *,
    drafters: Sequence[Drafter | Refusal] | None = None,
) -> Plan:
    """The plan. ``drafters`` replaces what the tables know: the user's heads or drafts as ``brought`` checked them."""
    options = options or PlanOptions()
    uses_share = runtime.engine in ("vllm", "sglang", "trtllm", "dynamo") and device.kind != "cpu"
    utilization = (options.gpu_memory_utilization or device.default_utilization) if uses_share else None
    place = Place(device, runtime, model, options, utilization, engine_gate(runtime))
    sizing = _sizing(place)
    baseline = memory.budget(device, sizing.settings)
    refused: list[Refusal] = []
    arms: list[PlannedArm] = []
    first = runtime_refusal(device, runtime, model)
    stops = (first,) if first else small_board(place, _alternatives(place, sizing))
    if not stops:
        full = ceiling(place) or _target_too_big(place, sizing, baseline)
        stops = (full,) if full else ()
    if stops:
        refused.extend(stops)
    else:
        for drafter in _candidates(place, drafters, refused):
            _consider(place, sizing, drafter, arms, refused)
    ranked = rank(arms)
    return Plan(
        device=device,
        runtime=runtime,
        model=model,
        kv_bytes_per_token=memory.kv_bytes_per_token(model, options.kv_cache_dtype),
        baseline=baseline,
        baseline_command=baseline_command(place, sizing) if first is None else "",
        gpu_memory_utilization=utilization or 0.0,
        max_model_len=sizing.settings.max_model_len,
        arms=ranked,
        refused=_tidy(refused, arms),
        notes=plan_notes(place, baseline, arms),
        guide=quick_start(place, ranked),
    )


def _sizing(place: Place) -> Sizing:
    options, model, device = place.options, place.model, place.device
    length = options.max_model_len or device.default_max_model_len
    if model.max_position_embeddings:
        length = min(length, model.max_position_embeddings)
    few = place.runtime.engine in ("llamacpp", "local")
    # The embedded engine computes in 32 bit unless told otherwise; vLLM does on a CPU that emulates bfloat16.
    in_32_bit = place.runtime.engine == "local" or (place.runtime.engine == "vllm" and not device.bf16)
    if in_32_bit:
        model = model.model_copy(update={"weight_bytes": 4 * model.parameters})
    settings = memory.Settings(
        model=model,
        utilization=place.utilization,
        max_model_len=length,
        max_num_seqs=options.max_num_seqs or (max(options.concurrency) if few else DEFAULT_SEQS),
        batched_tokens=options.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
        concurrency=max(options.concurrency),
        tokens_per_request=options.tokens_per_request,
        kv_dtype="fp32" if in_32_bit else options.kv_cache_dtype,
        tensor_parallel=options.tensor_parallel,
    )
    return Sizing(settings, _usable_variants(device, model))


def _usable_variants(device: Device, model: Model) -> tuple[Model, ...]:
    """Other checkpoints of the model in a precision the device computes in."""
    return tuple(v for v in variants_of(_canonical(model)) if _computes(device, v.quantization))


def _canonical(model: Model) -> Model:
    """The bundled facts of the same checkpoint, so that an alias finds its variants."""
    return bundled(model.id) or model


def _computes(device: Device, quantization: str) -> bool:
    """Orin and Ampere have no fp8 or fp4 (G5); integer weights with 16-bit arithmetic run on every GPU."""
    if device.kind == "cpu":
        return quantization in ("bf16", "fp16", "fp32")
    return {"nvfp4": device.fp4, "fp8": device.fp8}.get(quantization, True)


def _alternatives(place: Place, sizing: Sizing) -> tuple[str, ...]:
    """Up to three checkpoints that fit this device: this model's own first, in the device's own order of precision
    (Thor NVFP4 then W4A16, Orin W4A16 then AWQ), then smaller models of the same maker."""
    device, model = place.device, place.model
    order = ["nvfp4", "w4a16", "awq", "fp8", "bf16"] if device.fp4 else ["w4a16", "awq", "fp8", "bf16"]
    maker = _maker(model)
    others = [m for m in (bundled(i) for i in bundled_ids()) if m is not None and _maker(m) == maker]
    others = [m for m in others if m.parameters < model.parameters and _computes(device, m.quantization)]
    own = sorted(sizing.variants, key=lambda m: order.index(m.quantization) if m.quantization in order else 9)
    found: dict[str, str] = {}
    for candidate in [*own, *sorted(others, key=lambda m: (-m.parameters, m.weight_bytes))]:
        if candidate.weight_bytes < model.weight_bytes and _fits_alone(place, sizing, candidate):
            size = f"{candidate.quantization}, {candidate.weight_bytes / GIB:.1f} GiB"
            found[candidate.id] = f"a smaller or better-quantised model: {candidate.id} ({size})"
    return tuple(found.values())[:3] or ("a smaller or better-quantised model",)


def _maker(model: Model) -> str:
    return (model.target_of[-1] if model.target_of else _canonical(model).id).split("/")[0].lower()


def _fits_alone(place: Place, sizing: Sizing, candidate: Model) -> bool:
    """One user, four sequences, as much of the memory as is allowed."""
    share = None if place.utilization is None else max(place.utilization, memory.highest_utilization(place.device))
    settings = replace(sizing.settings, model=candidate, utilization=share, concurrency=1, max_num_seqs=4)
    return memory.budget(place.device, settings).fits


def _target_too_big(place: Place, sizing: Sizing, budget: MemoryBudget) -> Refusal | None:
    """M2: the target does not fit, not even with a shorter context, fp8 KV or another utilization."""
    if budget.fits or smallest_changes(place.device, sizing.settings) is not None:
        return None
    weights = place.model.weight_bytes / place.options.tensor_parallel / GIB
    why = f"{place.model.id} has {weights:.1f} GiB of weights; {place.device.name} has {budget.total / GIB:.1f} GiB"
    if budget.short_of == "admission":
        why += f", of which {budget.available / GIB:.1f} GiB are free now (stop what runs there first)"
    else:
        why += f", of which the engine may take {budget.requested / GIB:.1f} GiB"
    more = "more GPUs (--tensor-parallel-size)" if place.device.gpus > 1 else "memory tuning (F4)"
    return Refusal(method="all", rule="M2", why=f"{why}.", instead=(*_alternatives(place, sizing), more))


def _candidates(place: Place, given: Sequence[Drafter | Refusal] | None, refused: list[Refusal]) -> list[Drafter]:
    """Every drafter worth a look, best first; what is missing is said."""
    if given is not None:
        refused.extend(item for item in given if isinstance(item, Refusal))
        return [item for item in given if isinstance(item, Drafter)]
    heads = heads_for(place.model)
    found: list[Drafter] = list(heads)
    own = mtp_for(place.model)
    if own is not None:
        found.append(own)
    draft, why = draft_for(place.model)
    if draft is not None:
        found.append(draft)
    else:
        refused.append(
            Refusal(
                method="draft_model",
                rule="H4",
                why=f"{place.model.id}: {why}.",
                instead=("bring one of the same tokenizer",),
            )
        )
    if not any(d.method == "eagle3" for d in heads):
        offers = ([f"draft_model with {draft.id} (C2)"] if draft else []) + [
            "ngram, for answers that repeat the prompt (E5)"
        ]
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


def _consider(place: Place, sizing: Sizing, drafter: Drafter, arms: list[PlannedArm], refused: list[Refusal]) -> None:
    """One drafter through the gates: an arm (and its dynamic twin), or a refusal."""
    gates = (
        engine_method(place, drafter.method),
        drafter_engine(place, drafter),
        known_bug(place, drafter),
        draft_size(place, drafter),
    )
    stop = next((gate for gate in gates if gate is not None), None)
    if stop is not None:
        refused.append(stop)
        return
    same = [a for a in arms if a.drafter and (a.method, a.drafter.parallel_drafting) == _kind(drafter)]
    if len({a.drafter.id for a in same if a.drafter}) >= (_HEADS_PER_METHOD if drafter.method == "eagle3" else 1):
        return
    if drafter.parallel_drafting and same:
        return
    suffix = drafter.id.split("/")[0].lower() if same else ""
    varies = drafter.method in ("eagle3", "mtp", "draft_model") and not same and not schedule_problem(place)
    varies = varies and not drafter.parallel_drafting
    overload = load_only(place, drafter.method)
    if overload is not None:
        refused.append(overload)
        if varies:
            arms.append(make_arm(place, sizing, drafter, dynamic=True))
        return
    arm = make_arm(place, sizing, drafter, suffix=suffix)
    hopeless = never_pays(arm)
    if hopeless is not None:
        refused.append(hopeless)
        return
    arms.append(arm)
    if varies and drafter.method == "eagle3" and max(place.options.concurrency) >= LOAD_CONCURRENCY:
        arms.append(make_arm(place, sizing, drafter, dynamic=True))


def _kind(drafter: Drafter) -> tuple[str, bool]:
    return drafter.method, drafter.parallel_drafting


def _tidy(refused: Sequence[Refusal], arms: Sequence[PlannedArm]) -> tuple[Refusal, ...]:
    """One refusal a method and rule; a head that another engine serves is no refusal where the method has an arm."""
    kept: dict[tuple[str, str], Refusal] = {}
    for refusal in refused:
        served = refusal.rule == "V2" and any(arm.method == refusal.method for arm in arms)
        if not served:
            kept.setdefault((refusal.method, refusal.rule), refusal)
    return tuple(kept.values())


__all__ = ["brought", "plan", "runtime_for"]
