"""From a drafter to a planned arm: k, utilization, memory, what to change when it is short, the command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from surespec import memory
from surespec.dialects import Deployment, render
from surespec.dialects import vllm as vllm_dialect
from surespec.dialects.base import compact_json
from surespec.dialects.versions import release
from surespec.fitting import smallest_changes
from surespec.plan.cost import break_even_length
from surespec.plan.gates import FLAGGED_DRAFT_SHARE, LOAD_CONCURRENCY, Place, bugs_for
from surespec.plan.tuning import DEFAULT_SEQS, batch_schedule, behaviour_notes, start_k, tuning_for
from surespec.plan_nouns import GIB, Drafter, Model, PlannedArm

C5_STEP = 0.05
MIN_UTILIZATION = 0.30
_ORDER = {"eagle3": 0, "mtp": 1, "dflash": 2, "dspark": 3, "draft_model": 5, "ngram": 6}
_SHAPE_ORDER = 4


@dataclass(frozen=True)
class Sizing:
    """The launch's settings shared by baseline and arms."""

    settings: memory.Settings
    variants: tuple[Model, ...]


@dataclass(frozen=True)
class _Utilization:
    value: float | None
    rules: tuple[str, ...]
    note: str = ""


def arm_utilization(place: Place, with_drafter: memory.Settings) -> _Utilization:
    """C5 once, when speculation is first added; set aside where only the baseline's value leaves enough KV (M1)."""
    base = place.utilization
    if base is None:
        return _Utilization(None, ())
    if place.options.already_speculates:
        return _Utilization(base, ("C5",), f"C5: the recipe speculates already, so {base:.2f} is kept.")
    lowered = max(MIN_UTILIZATION, round(base - C5_STEP, 2))
    if lowered >= base:
        return _Utilization(base, ())
    low = memory.budget(place.device, replace(with_drafter, utilization=lowered))
    high = memory.budget(place.device, replace(with_drafter, utilization=base))
    lost = (high.kv - low.kv) / GIB
    if not low.fits and high.fits:
        note = (
            f"C5 would lower gpu-memory-utilization to {lowered:.2f}, but KV would then be short by "
            f"{-low.margin / GIB:.2f} GiB; M1: {base:.2f} is kept."
        )
        return _Utilization(base, ("C5", "M1"), note)
    note = (
        f"C5 lowers gpu-memory-utilization from {base:.2f} to {lowered:.2f}; M1, the other view: {base:.2f} would keep "
        f"{lost:.1f} GiB more KV, since the drafter is paid from the same budget either way."
    )
    return _Utilization(lowered, ("C5",), note)


def make_arm(place: Place, sizing: Sizing, drafter: Drafter, *, dynamic: bool = False, suffix: str = "") -> PlannedArm:
    """The arm of one drafter at its starting k; ``dynamic`` adds k by batch size."""
    k, rules = start_k(place.device.family, drafter)
    seqs = place.options.max_num_seqs or DEFAULT_SEQS
    under_load = min(place.options.concurrency) >= LOAD_CONCURRENCY
    schedule = batch_schedule(k, seqs, keep_under_load=under_load) if dynamic else None
    if sizing.settings.kv_dtype == "fp32":
        drafter = drafter.model_copy(update={"weight_bytes": 2 * drafter.weight_bytes})  # given for 16 bit
    settings = replace(sizing.settings, drafter=drafter, k=k)
    chosen = arm_utilization(place, settings)
    settings = replace(settings, utilization=chosen.value)
    budget = memory.budget(place.device, settings)
    changes = () if budget.fits else (smallest_changes(place.device, settings, sizing.variants) or ())

    wanted = vllm_dialect.speculative_config(drafter, k, schedule=schedule)
    version = place.engine_version if place.runtime.host_engine == "vllm" else ""
    gated = vllm_dialect.gate(wanted, version)
    if dynamic and not release(place.runtime.version) and place.runtime.engine == "vllm":
        gated = vllm_dialect.Gated(wanted)  # asked for although the version is not known; the note says what it needs
    command = render(_deployment(place, settings, gated.config, drafter))
    notes = [chosen.note] if chosen.note else []
    notes += [f"V1: {name} is left out: it {problem}." for name, problem in gated.dropped]
    notes += drafter_notes(place, sizing, drafter, k)
    notes += command.notes
    if dynamic:
        notes.append(_dynamic_note(place, under_load))
    if not budget.fits and not changes:
        notes.append("F4: no change found here makes it fit; hand over to memory tuning (jetson-inference-mem-tune).")
    extra = ["K1"] if dynamic else []
    if under_load:
        extra.append("W3")
    return PlannedArm(
        name=_name(drafter, k, dynamic=dynamic, suffix=suffix),
        method=drafter.method,
        num_speculative_tokens=k,
        speculative_config=gated.config,
        gpu_memory_utilization=chosen.value,
        fits=budget.fits,
        margin_gib=budget.margin_gib,
        rules=tuple(dict.fromkeys([*rules, *chosen.rules, *_match_rules(drafter), *extra])),
        command=command.text,
        argv=command.argv,
        files=dict(command.files),
        drafter=drafter,
        memory=budget,
        changes=changes,
        tuning=tuning_for(place, drafter, k),
        notes=tuple(dict.fromkeys(notes)),
        break_even_length=break_even_length(sizing.settings.model, drafter, k),
    )


def baseline_command(place: Place, sizing: Sizing) -> str:
    """The command of the arm without speculation."""
    return render(_deployment(place, sizing.settings, None, None)).text


def _deployment(
    place: Place, settings: memory.Settings, config: dict[str, object] | None, drafter: Drafter | None
) -> Deployment:
    options = place.options
    return Deployment(
        device=place.device,
        runtime=place.runtime,
        model=place.model,
        max_model_len=settings.max_model_len,
        utilization=settings.utilization,
        config=config,
        drafter=drafter,
        kv_dtype=settings.kv_dtype,
        max_num_seqs=options.max_num_seqs,
        batched_tokens=options.max_num_batched_tokens,
        tensor_parallel=options.tensor_parallel,
        concurrency=max(options.concurrency),
        host=options.host,
        port=options.port,
        kubernetes=options.kubernetes,
        old_llamacpp_flags=options.old_llamacpp_flags,
    )


def _name(drafter: Drafter, k: int, *, dynamic: bool, suffix: str) -> str:
    method = "peagle" if drafter.parallel_drafting else drafter.method
    return f"{method}-k{k}" + ("-dynamic" if dynamic else "") + (f"-{suffix}" if suffix else "")


def _match_rules(drafter: Drafter) -> list[str]:
    rules = ["H1"] if drafter.match in ("variant", "shape") else []
    if drafter.context and drafter.method != "draft_model":
        rules.append("H2")
    return rules


def drafter_notes(place: Place, sizing: Sizing, drafter: Drafter, k: int) -> list[str]:
    """What has to be known about this drafter on this target."""
    notes = []
    if drafter.match == "shape":
        notes.append(
            f"H1: {drafter.id} fits by architecture and vocabulary only; it was trained for another checkpoint."
        )
    elif drafter.match == "variant":
        notes.append(
            f"H1: {drafter.id} was trained for the original checkpoint of {place.model.id}; measure its acceptance."
        )
    length = sizing.settings.max_model_len
    if drafter.context and drafter.method != "draft_model" and length > drafter.context:
        notes.append(
            f"H2: {drafter.id} is configured for {drafter.context} tokens and max-model-len is {length}; "
            "expect less acceptance on longer requests, and judge with your own prompt lengths."
        )
    if drafter.method == "draft_model" and drafter.weight_bytes > FLAGGED_DRAFT_SHARE * place.model.weight_bytes:
        share = drafter.weight_bytes / place.model.weight_bytes
        notes.append(f"H7: {drafter.id} has {share:.0%} of the target's bytes and reads them {k} times a step.")
    if drafter.id and not drafter.license:
        notes.append(f"H6: the license of {drafter.id} is not known here; read its page before you ship.")
    if drafter.gated or place.model.gated:
        gated = drafter.id if drafter.gated else place.model.id
        notes.append(f"H5: {gated} is gated: set HF_TOKEN (and HUGGING_FACE_HUB_TOKEN for Dynamo).")
    if place.model.num_experts and k > 2:
        even = [break_even_length(place.model, drafter, n) for n in (k, 2)]
        notes.append(
            f"K2: it breaks even at {even[0]:.2f} tokens a step, at k = 2 at {even[1]:.2f}; try the smaller k too."
        )
    if drafter.estimated:
        notes.append(f"The size of {drafter.id or 'the MTP layers'} is an estimate from its shape.")
    if drafter.evidence:
        notes.append(f"Known: {drafter.evidence}.")
    notes += [f"Known problem: {bug['what']}; {bug['fix']} ({bug['source']})." for bug in _warnings(place, drafter)]
    return [*notes, *behaviour_notes(place, drafter)]


def _warnings(place: Place, drafter: Drafter) -> Sequence[dict[str, str]]:
    bugs = bugs_for(place, drafter.method, drafter)
    return [bug for bug in bugs if bug["effect"] == "warn" and ("method" in bug or "draft" in bug)]


def _dynamic_note(place: Place, under_load: bool) -> str:
    needs = "" if release(place.runtime.version) else " It needs vLLM 0.24 or newer: check the version first."
    view = (
        "W3 says not at this concurrency; the other view (NVIDIA's concurrency-8 figure) has to be measured. "
        if under_load
        else ""
    )
    return f"{view}K1: the table is a start to be measured, not a finding; k = 0 is not free.{needs}"


def rank(arms: Sequence[PlannedArm]) -> tuple[PlannedArm, ...]:
    """Best first: what fits, then EAGLE-3 heads trained for the target, own layers, block drafters, heads by shape,
    draft models, ngram; a plain arm before its dynamic twin."""

    def key(arm: PlannedArm) -> tuple[object, ...]:
        drafter = arm.drafter
        by_shape = drafter is not None and drafter.match == "shape"
        order = _SHAPE_ORDER if by_shape else _ORDER[arm.method]
        dynamic = "num_speculative_tokens_per_batch_size" in arm.speculative_config
        return (not arm.fits, order, dynamic, drafter.rank if drafter else 9, arm.name)

    return tuple(sorted(arms, key=key))


def config_text(arm: PlannedArm) -> str:
    """The arm's speculative config as compact JSON."""
    return compact_json(arm.speculative_config)
