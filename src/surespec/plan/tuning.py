"""Beyond k: what else is worth a try or a look, each with its rule; and k by batch size."""

from __future__ import annotations

from surespec.dialects.base import compact_json
from surespec.dialects.versions import at_least, release
from surespec.dialects.vllm import field_problem
from surespec.plan.gates import LOAD_CONCURRENCY, Place
from surespec.plan_nouns import Drafter, Tuning

DEFAULT_SEQS = 256
OWN_VERIFY_SIZES = "0.31"  # vllm/config/vllm.py of 0.31.0: "uniform decode sizes are appended"
DEFAULT_BATCHED_TOKENS = 2048
_START_K = {"thor": 5, "agx-orin": 3}
_METHOD_K = {"eagle3": 5, "draft_model": 4, "ngram": 5, "mtp": 3, "dflash": 15, "dspark": 4}


def start_k(device_family: str, drafter: Drafter) -> tuple[int, tuple[str, ...]]:
    """The k to start with, and the rules behind it.

    C1 and C2 give the method's start, C3 the device's, which overrides both. The newer methods start as K5 says and
    are lowered, not raised, by the device; a head's block (K5) and a model's MTP layers (K6) bound them.
    """
    method = drafter.method
    k = _METHOD_K[method]
    names = {"eagle3": ["C1"], "draft_model": ["C2"], "ngram": ["E5"]}.get(method, ["K5"])
    device_k = _START_K.get(device_family)
    lowered = method in ("mtp", "ngram") and device_k is not None and device_k <= k
    if device_k is not None and (method in ("eagle3", "draft_model") or lowered):
        k, names = device_k, [*names, "C3"]
    if drafter.max_k:
        k = min(k, drafter.max_k)
    if drafter.n_predict > 1 and k > drafter.n_predict and k % drafter.n_predict:
        k, names = k - k % drafter.n_predict, [*names, "K6"]
    return k, tuple(names)


def batch_schedule(k: int, max_num_seqs: int, *, keep_under_load: bool) -> list[list[int]]:
    """A starting table of k by batch size, to be measured (K1): full k for one or two, half for a few, and at 8 and
    more nothing, or a little where the load is all there is."""
    half, last = max(1, (k + 1) // 2), (1 if keep_under_load else 0)
    top = max(max_num_seqs, 9)
    if keep_under_load:
        return [[1, 3, k], [4, 7, half], [8, 15, min(2, half)], [16, max(top, 16), last]]
    return [[1, 2, k], [3, 7, half], [8, top, last]]


def schedule_problem(place: Place) -> str:
    """Why the engine cannot vary k by batch size; empty when it can (or its version is not known)."""
    if place.runtime.host_engine in ("trtllm", "local"):
        return ""
    if place.runtime.host_engine != "vllm":
        return f"{place.runtime.engine} takes no such table"
    if place.runtime.engine == "vllm" and not release(place.runtime.version):
        # V4 would leave the field out; where load is all there is, it is offered with a note instead.
        return "" if min(place.options.concurrency) >= LOAD_CONCURRENCY else "the version is not known"
    return field_problem("num_speculative_tokens_per_batch_size", place.engine_version)


def capture_sizes(k: int, max_num_seqs: int) -> list[int]:
    """Capture sizes with every multiple of k + 1 up to 8 sequences, then in steps, and some plain ones."""
    width = k + 1
    sequences = [n for n in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32) if n <= max(1, max_num_seqs)]
    plain = [n for n in (1, 2, 4, 8, 16, 32) if n <= max(1, max_num_seqs)]
    return sorted({*plain, *(n * width for n in sequences)})


def tuning_for(place: Place, drafter: Drafter, k: int) -> tuple[Tuning, ...]:
    """What to try beyond the plain arm, for engines that have the knob."""
    found: list[Tuning] = []
    seqs = place.options.max_num_seqs or DEFAULT_SEQS
    if place.runtime.host_engine == "vllm" and place.device.kind != "cpu":
        found.extend(_graph_sizes(place, k))
        found.extend(_draft_fields(place, drafter))
    if place.runtime.host_engine == "vllm":
        found.extend(_batched_tokens(place, k, seqs))
    if not place.options.kv_cache_dtype.startswith("fp8") and place.device.fp8 and place.runtime.host_engine == "vllm":
        why = "halves KV, which makes room for the drafter; measure the baseline with it too"
        found.append(Tuning(rule="G5", flag="--kv-cache-dtype", value="fp8", why=why))
    return tuple(found)


def _graph_sizes(place: Place, k: int) -> list[Tuning]:
    """Capture sizes for engines that do not add the verify widths themselves (G1); nothing for those that do."""
    if at_least(place.runtime.version or place.engine_version, OWN_VERIFY_SIZES):
        return []
    sizes = capture_sizes(k, place.options.max_num_seqs or max(32, *place.options.concurrency))
    why = f"verifying n sequences takes n x {k + 1} tokens; without that size it runs at the next larger one"
    if not release(place.runtime.version):
        why += f" (only if the engine is older than {OWN_VERIFY_SIZES}, which adds these sizes itself)"
    value = compact_json({"cudagraph_capture_sizes": sizes})
    return [Tuning(rule="G1", flag="--compilation-config", value=value, why=why)]


def _draft_fields(place: Place, drafter: Drafter) -> list[Tuning]:
    """The drafter's own attention backend and KV type, where the version has the field."""
    if drafter.method in ("ngram",) or not release(place.engine_version):
        return []
    found = []
    if at_least(place.engine_version, "0.21"):
        found.append(
            Tuning(
                rule="G2",
                flag="speculative_config.attention_backend",
                value="TRITON_ATTN",
                why="only if the target's backend refuses the head's shapes at start",
            )
        )
    if at_least(place.engine_version, "0.26") and not place.device.fp8 and place.device.kind == "jetson":
        why = "Orin has no fp8; the draft's KV must be bfloat16 too"
        found.append(Tuning(rule="G2", flag="speculative_config.kv_cache_dtype", value="bfloat16", why=why))
    return found


def _batched_tokens(place: Place, k: int, seqs: int) -> list[Tuning]:
    """The floor of max_num_batched_tokens (G4), only where it is set too low."""
    floor = seqs * (k + 1)
    have = place.options.max_num_batched_tokens
    if have is None or have >= floor:
        return []
    why = f"{seqs} sequences x {k + 1} tokens; below that a full batch's verify step is split"
    return [Tuning(rule="G4", flag="--max-num-batched-tokens", value=str(floor), why=why)]


def behaviour_notes(place: Place, drafter: Drafter) -> tuple[str, ...]:
    """What changes in the engine's behaviour with this method."""
    notes = []
    method = drafter.method
    if place.runtime.host_engine == "vllm":
        older = not at_least(place.engine_version, "0.30")
        if method == "ngram" and older:
            notes.append("G3: on the older model runner ngram loses async scheduling; the baseline keeps it.")
        if method in ("eagle3", "mtp"):
            notes.append("G6: with prefix caching, the last cached block of a prefix is computed again.")
        if method == "draft_model" and at_least(place.engine_version, "0.22"):
            notes.append("V6: a draft with a shorter context lowers max_model_len, with a warning in the log only.")
    if method == "ngram":
        notes.append("E5: pays where the answer repeats the prompt; expect little in open chat.")
    return tuple(notes)
