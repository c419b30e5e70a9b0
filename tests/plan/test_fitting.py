"""The smallest set of changes that makes a launch fit."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from surespec import memory
from surespec.fitting import smallest_changes
from surespec.models import bundled, variants_of
from surespec.plan_nouns import GIB, Device, Model
from surespec.probe.table import simulated_device


def known(name: str) -> Model:
    model = bundled(name)
    assert model is not None
    return model


def settings_for(device: Device, model: Model, **changes: object) -> memory.Settings:
    base = memory.Settings(
        model=model,
        utilization=device.default_utilization,
        max_model_len=8192,
        max_num_seqs=256,
        batched_tokens=2048,
        concurrency=1,
        tokens_per_request=2176,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_fp8_kv_where_the_device_has_it() -> None:
    card = simulated_device("l4")
    wanted = settings_for(card, known("Llama-3.1-8B"), max_model_len=35000)
    assert not memory.budget(card, wanted).fits
    changes = smallest_changes(card, wanted)
    assert changes is not None and [(c.flag, c.value) for c in changes] == [("--kv-cache-dtype", "fp8")]


def test_orin_gets_no_fp8_kv_but_a_shorter_context() -> None:
    board = simulated_device("orin-agx-32gb")
    wanted = settings_for(board, known("Llama-3.1-8B"), max_model_len=40000)
    changes = smallest_changes(board, wanted)
    assert changes is not None and [(c.flag, c.value) for c in changes] == [("--max-model-len", "20000")]


def test_two_changes_before_none() -> None:
    board = simulated_device("orin-agx-64gb")
    seventy = known("Llama-3.3-70B")
    usable = [m for m in variants_of(seventy) if m.quantization == "w4a16"]
    changes = smallest_changes(board, settings_for(board, seventy, max_model_len=65536), usable)
    assert changes is not None
    assert "model" in {c.flag for c in changes} and len(changes) == 2


def test_nothing_helps_is_said() -> None:
    board = simulated_device("orin-nano-4gb")
    assert smallest_changes(board, settings_for(board, known("Llama-3.3-70B"))) is None


def test_a_utilization_above_what_is_free_is_lowered() -> None:
    thor = simulated_device("thor-t5000").model_copy(update={"available_bytes": 80 * GIB})
    changes = smallest_changes(thor, settings_for(thor, known("Llama-3.1-8B"), utilization=0.85))
    assert changes is not None
    (change,) = changes
    assert (change.flag, change.rule) == ("--gpu-memory-utilization", "M4") and float(change.value) < 0.65


@settings(max_examples=40, deadline=None)
@given(
    sku=st.sampled_from(["l4", "orin-agx-32gb", "orin-agx-64gb", "rtx-4090", "thor-t4000"]),
    name=st.sampled_from(["Llama-3.1-8B", "Qwen3-8B", "gpt-oss-20b", "Qwen3-30B-A3B"]),
    length=st.integers(2048, 131072),
    concurrency=st.integers(1, 64),
)
def test_what_is_advised_really_fits(sku: str, name: str, length: int, concurrency: int) -> None:
    """Applying the advice, in whatever number of changes, gives a budget that fits; never above 0.90."""
    device, model = simulated_device(sku), known(name)
    wanted = settings_for(device, model, max_model_len=length, concurrency=concurrency)
    changes = smallest_changes(device, wanted, variants_of(model))
    if memory.budget(device, wanted).fits or changes is None:
        return
    for change in changes:
        if change.flag == "--kv-cache-dtype":
            wanted = replace(wanted, kv_dtype=change.value)
        elif change.flag == "--max-model-len":
            wanted = replace(wanted, max_model_len=int(change.value))
        elif change.flag == "--max-num-seqs":
            wanted = replace(wanted, max_num_seqs=int(change.value))
        elif change.flag == "--gpu-memory-utilization":
            wanted = replace(wanted, utilization=float(change.value))
            assert float(change.value) <= 0.90
        else:
            wanted = replace(wanted, model=known(change.value))
    assert memory.budget(device, wanted).fits
    assert len(changes) <= 3


def test_advice_names_a_known_rule() -> None:
    from surespec.rules import rules

    card = simulated_device("l4")
    changes = smallest_changes(card, settings_for(card, known("Qwen3-8B"), max_model_len=40000, concurrency=16))
    assert changes and all(change.rule in rules() for change in changes)
