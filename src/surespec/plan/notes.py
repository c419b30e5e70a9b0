"""What a plan says beside its arms: assumptions, contradictions, the state of the machine."""

from __future__ import annotations

from collections.abc import Sequence

from surespec import memory
from surespec.dialects import compact_json
from surespec.dialects.versions import at_least, release
from surespec.plan.gates import LOAD_CONCURRENCY, Place, bugs_for
from surespec.plan_nouns import GIB, MemoryBudget, PlannedArm

MOSTLY_TTFT = 0.5


def plan_notes(place: Place, baseline: MemoryBudget, arms: Sequence[PlannedArm]) -> tuple[str, ...]:
    """The notes of a plan, most important first."""
    notes = [
        *_machine(place),
        *_runtime(place, arms),
        *_workload(place, arms),
        *_memory(place, baseline, arms),
        *_model(place),
    ]
    notes += (
        [
            f"Known problem: {b['what']}; {b['fix']} ({b['source']})."
            for b in bugs_for(place, "", None)
            if "method" not in b and "draft" not in b
        ]
        if arms
        else []
    )
    return tuple(dict.fromkeys(notes))


def _machine(place: Place) -> list[str]:
    device = place.device
    notes = list(device.warnings)
    if device.simulated:
        notes.append(f"{device.name} is simulated; assumed: {', '.join(device.assumed) or 'nothing'}.")
    if device.power_mode and not device.power_mode.upper().startswith("MAXN"):
        notes.append(
            f"G8: the power mode is {device.power_mode}, not MAXN: benchmarks would measure the governor "
            "(sudo nvpmodel -m 0 && sudo jetson_clocks)."
        )
    if device.gpus > 1 and place.options.tensor_parallel == 1:
        notes.append(f"{device.gpus} GPUs are here; this plan uses one.")
    return notes


def _runtime(place: Place, arms: Sequence[PlannedArm]) -> list[str]:
    runtime = place.runtime
    notes = []
    if runtime.engine == "dynamo":
        ask = compact_json({"model": place.model.id, "messages": [{"role": "user", "content": "Hello"}]})
        address = f"http://{place.options.host}:{place.options.port}/v1/chat/completions"
        notes.append(f"D4: then curl {address} -H 'Content-Type: application/json' -d '{ask}'.")
        notes.append("D3: file discovery needs neither etcd nor NATS; S2's 16 GB are too small for an 8B in 16 bit.")
        notes.append(
            f"V5: fields are written for {runtime.host_engine} {place.engine_version}, which this Dynamo pins."
        )
        if place.device.gpus == 1:
            notes.append("E3: for one GPU the engine alone is simpler.")
        if runtime.host_engine == "sglang":
            notes.append("D2: Dynamo's own matrix lists speculation with SGLang as in progress.")
    elif arms and runtime.engine == "vllm" and not release(runtime.version):
        notes.append(
            f"V4: the version of vLLM is not known; only what {runtime.oldest or 'every release'} takes is written."
        )
    if runtime.engine == "vllm" and runtime.image:
        notes.append("E2: the image is started with --entrypoint vllm, so that `serve` is not doubled.")
    if runtime.image.endswith("latest-jetson-orin"):
        notes.append("C4: older Orin: the NVIDIA-AI-IOT image; its vLLM moves, so ask it (`vllm --version`).")
    if runtime.engine == "llamacpp":
        names = "old names (--draft-max)" if place.options.old_llamacpp_flags else "new names (--spec-draft-n-max)"
        notes.append(f"E4: the flags have the {names}; a build's --help decides.")
    return notes


def _workload(place: Place, arms: Sequence[PlannedArm]) -> list[str]:
    options = place.options
    notes = []
    share = options.ttft_share
    if share is not None and share >= MOSTLY_TTFT:
        notes.append(f"W6: {share:.0%} of a request is time to first token, which speculation does not shorten.")
    low, high = min(options.concurrency), max(options.concurrency)
    if arms and low <= 2 and high >= LOAD_CONCURRENCY:
        dynamic = any("num_speculative_tokens_per_batch_size" in a.speculative_config for a in arms)
        newer = "num_speculative_tokens_per_batch_size, vLLM 0.24 and newer"
        offer = "the dynamic arm" if dynamic else newer if place.runtime.host_engine == "vllm" else "an engine with K1"
        notes.append(
            f"W3: at {LOAD_CONCURRENCY} streams speculation may lose. Gains there have been measured too, and k can "
            f"fall as the batch grows ({offer}): measure concurrency {LOAD_CONCURRENCY} before keeping anything (P1)."
        )
    elif arms and 2 < low < LOAD_CONCURRENCY:
        notes.append(f"W2: speculation fits concurrency 1 or 2 best; at {low} expect less.")
    if arms:
        notes.append("P1: nothing here is a promise: measure baseline and arm on the same prompts (surespec tune).")
    return notes


def _memory(place: Place, baseline: MemoryBudget, arms: Sequence[PlannedArm]) -> list[str]:
    notes = []
    if not baseline.fits:
        short = -baseline.margin / GIB
        helps = "; each arm lists the smallest changes that help" if arms else ""
        notes.append(f"M3: the target alone does not fit as asked (short by {short:.2f} GiB){helps}.")
    if place.device.unified and place.device.available_bytes is None and place.device.kind != "cpu":
        used = memory.system_use(place.device) / GIB
        notes.append(f"M4: free memory was not read; {used:.1f} GiB are taken as the system's own.")
    return notes


def _model(place: Place) -> list[str]:
    model, device = place.model, place.device
    notes = []
    if model.num_experts:
        notes.append("K2: a mixture of experts reads more experts for a wider step; the break-even lengths count that.")
    if model.weight_source.startswith("calculated"):
        notes.append("M6: the weights' size is calculated; the checkpoint's own bytes may be some percent more.")
    if (model.quantization == "nvfp4" and not device.fp4) or (model.quantization == "fp8" and not device.fp8):
        notes.append(f"G5: {device.name} does not compute in {model.quantization}; W4A16 is its precision.")
    if device.family == "thor" and at_least(place.engine_version, "0.20") and model.quantization == "bf16":
        notes.append("On Thor NVFP4 or W4A16 weights read a third of the bytes, with or without speculation.")
    return notes
