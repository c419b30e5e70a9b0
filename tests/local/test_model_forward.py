"""The target model: batches do not change a row's bits, the cache is used in place, quantised forms stay near."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import toy
from surespec.errors import EngineError, UsageError
from surespec.local.graph import GraphBuilder, rope_tables
from surespec.local.kv import KVCache
from surespec.local.model import TargetModel
from surespec.local.quantize import dequantize_blocks, quantize_blocks
from surespec.local.types import FloatArray, SeqChunk
from surespec.local.weights import load_model_files

MAKERS = {
    "llama": lambda p: toy.make_llama(p),
    "one head a group": lambda p: toy.make_llama(p, heads=2, kv_heads=2, hidden=64, head_dim=32),
    "qwen2": lambda p: toy.make_qwen2(p),
    "qwen3": lambda p: toy.make_qwen3(p),
}
PROMPTS = [np.random.default_rng(i).integers(0, 320, n) for i, n in enumerate((5, 40, 17, 1, 130))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> TargetModel:
    return TargetModel(load_model_files(folder), threads=1)


def filled(model: TargetModel, slots: int = len(PROMPTS), max_len: int = 512) -> KVCache:
    """A cache whose slots hold the prompts."""
    cache = model.new_cache(slots, max_len)
    for slot in range(slots):
        cache.alloc()
        model.forward([SeqChunk(slot, 0, PROMPTS[slot], len(PROMPTS[slot]))], cache)
    return cache


def one_by_one(model: TargetModel, tokens: list[np.ndarray]) -> list[FloatArray]:
    """Logits of each prompt's continuation, a token and a sequence at a time."""
    cache, rows = filled(model), []
    for slot, new in enumerate(tokens):
        at = len(PROMPTS[slot])
        steps = [model.forward([SeqChunk(slot, at + i, new[i : i + 1], 0)], cache).logits for i in range(len(new))]
        rows.append(np.concatenate(steps))
    return rows


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_row_has_the_same_bits_alone_in_a_verify_and_in_a_mixed_batch(
    maker: str, precision: str, tmp_path: Path
) -> None:
    model = TargetModel(load_model_files(MAKERS[maker](tmp_path / "m")), precision, threads=1)
    tokens = [np.random.default_rng(9 + i).integers(0, 320, 6) for i in range(len(PROMPTS))]
    alone = one_by_one(model, tokens)
    cache = filled(model)
    for slot, new in enumerate(tokens):
        together = model.forward([SeqChunk(slot, len(PROMPTS[slot]), new, 0)], cache).logits
        assert np.array_equal(together, alone[slot])
    lengths = (3, 1, 6, 2, 5)
    chunks = [SeqChunk(s, len(PROMPTS[s]), tokens[s][:n], 0) for s, n in enumerate(lengths)]
    mixed = np.split(model.forward(chunks, cache).logits, np.cumsum(lengths)[:-1])
    for slot, rows in enumerate(mixed):
        assert np.array_equal(rows, alone[slot][: lengths[slot]])


def test_rejected_tokens_leave_no_trace(model: TargetModel) -> None:
    cache = filled(model, 1)
    at = len(PROMPTS[0])
    model.forward([SeqChunk(0, at, np.array([7, 8, 9, 10, 11]), 0)], cache)
    again = model.forward([SeqChunk(0, at, np.array([200]), 0)], cache).logits
    fresh = model.forward([SeqChunk(0, at, np.array([200]), 0)], filled(model, 1)).logits
    assert np.array_equal(again, fresh)


def test_chunked_prefill_equals_whole_prefill(model: TargetModel) -> None:
    whole = model.new_cache(1, 512)
    whole.alloc()
    parts = model.new_cache(1, 512)
    parts.alloc()
    expected = model.forward([SeqChunk(0, 0, PROMPTS[4], 0)], whole).logits
    got = [model.forward([SeqChunk(0, i, PROMPTS[4][i : i + 50], 0)], parts).logits for i in (0, 50, 100)]
    assert np.array_equal(np.concatenate(got), expected)


def test_the_cache_is_bound_without_a_copy(model: TargetModel) -> None:
    cache = filled(model, 2)
    chunk = [SeqChunk(1, len(PROMPTS[1]), np.array([3]), 0)]
    before = model.forward(chunk, cache).logits
    assert cache.data[0, 1, 0, len(PROMPTS[1])].any(), "the new key was not written into the NumPy array"
    kept = cache.data[1, 1].copy()
    cache.data[1, 1, :, 0] += 1.0
    assert not np.array_equal(model.forward(chunk, cache).logits, before), "a change in the NumPy array was not seen"
    cache.data[1, 1] = kept
    assert np.array_equal(model.forward(chunk, cache).logits, before)


def test_sequences_survive_growth_of_the_cache_and_a_move_to_another_slot(model: TargetModel) -> None:
    cache = filled(model, 3)
    assert cache.length == 128
    expected = model.forward([SeqChunk(2, 17, np.array([4]), 0)], cache).logits
    model.forward([SeqChunk(0, 5, np.arange(200) % 300, 200)], cache)
    assert cache.length == 256
    assert np.array_equal(model.forward([SeqChunk(2, 17, np.array([4]), 0)], cache).logits, expected)
    assert cache.free(0) == (2, 0)
    assert cache.length == 128
    assert np.array_equal(model.forward([SeqChunk(0, 17, np.array([4]), 0)], cache).logits, expected)


def test_only_the_rows_asked_for_come_back(model: TargetModel) -> None:
    cache = filled(model, 3)
    tokens = np.array([5, 6, 7])
    everything = model.forward([SeqChunk(s, len(PROMPTS[s]), tokens, 0) for s in range(3)], cache).logits
    some = [SeqChunk(s, len(PROMPTS[s]), tokens, first) for s, first in enumerate((2, 3, 1))]
    assert np.array_equal(model.forward(some, cache).logits, everything[[2, 7, 8]])
    nothing = model.forward([SeqChunk(0, len(PROMPTS[0]), tokens, 3)], cache).logits
    assert nothing.shape == (0, 320)


def test_aux_states_are_the_residual_streams_entering_the_layers(folder: Path) -> None:
    files = load_model_files(folder)
    model = TargetModel(files, aux_layers=(0, 1, 3), threads=1)
    cache = model.new_cache(1, 512)
    cache.alloc()
    aux = model.forward([SeqChunk(0, 0, PROMPTS[1], 40)], cache).aux
    assert aux is not None
    assert aux.shape == (40, 96)
    assert np.array_equal(aux[:, :32], files.tensors["model.embed_tokens.weight"][PROMPTS[1]])
    assert np.abs(aux[:, 32:64] - aux[:, :32]).max() > 0.01
    assert np.abs(aux[:, 64:] - aux[:, 32:64]).max() > 0.01


def test_what_cannot_be_run_is_refused(model: TargetModel, folder: Path) -> None:
    cache = filled(model, 2)
    one = np.array([1])
    with pytest.raises(EngineError, match="not a gapless range"):
        model.forward([SeqChunk(1, 40, one, 0), SeqChunk(0, 5, one, 0)], cache)
    with pytest.raises(EngineError, match="not a gapless range of the 2 in use"):
        model.forward([SeqChunk(2, 0, one, 0)], cache)
    with pytest.raises(EngineError, match="at least one token"):
        model.forward([SeqChunk(0, 5, one[:0], 0)], cache)
    with pytest.raises(EngineError, match="vocabulary of 320"):
        model.forward([SeqChunk(0, 5, np.array([320]), 0)], cache)
    with pytest.raises(EngineError, match="longer than the maximum of 512"):
        model.forward([SeqChunk(0, 512, one, 0)], cache)
    with pytest.raises(UsageError, match="'fp8' is not known"):
        TargetModel(load_model_files(folder), "fp8")


@pytest.mark.parametrize(("precision", "limit"), [("int8", 0.25), ("int4", 4.0)])
def test_quantised_logits_stay_near_fp32(folder: Path, model: TargetModel, precision: str, limit: float) -> None:
    quantised = TargetModel(load_model_files(folder), precision, threads=1)
    caches = [model.new_cache(1, 512), quantised.new_cache(1, 512)]
    for cache in caches:
        cache.alloc()
    exact, rough = (
        m.forward([SeqChunk(0, 0, PROMPTS[1], 0)], c).logits for m, c in zip((model, quantised), caches, strict=True)
    )
    difference = float(np.sqrt(np.mean((exact - rough) ** 2)))
    assert 0 < difference < limit * float(exact.std()) / 4


@pytest.mark.parametrize(("bits", "steps"), [(8, 255), (4, 15)])
def test_block_quantisation_is_within_one_step(bits: int, steps: int) -> None:
    weight = np.random.default_rng(1).standard_normal((7, 70)).astype(np.float32)
    weight[2] = 0.0
    codes, scales = quantize_blocks(weight, bits)
    assert codes.shape == (7, 3, 32 * bits // 8)
    back = dequantize_blocks(codes, scales, bits, 70)
    padded = np.pad(np.abs(weight), ((0, 0), (0, 26))).reshape(7, 3, 32).max(2).repeat(32, 1)[:, :70]
    assert (np.abs(back - weight) <= 2 * padded / steps * 1.1 + 1e-7).all()
    assert not back[2].any()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_operator_multiplies_by_what_the_blocks_stand_for(precision: str) -> None:
    rng = np.random.default_rng(2)
    weight, x = rng.standard_normal((24, 64)).astype(np.float32), rng.standard_normal((3, 64)).astype(np.float32)
    graph = GraphBuilder(precision)
    graph.linear(graph.input("x", ["n", 64]), "y", weight, bias=np.arange(24, dtype=np.float32))
    graph.output("y", ["n", 24])
    (got,) = graph.session(1).run(None, {"x": x})
    bits = 8 if precision == "int8" else 4
    expected = x @ dequantize_blocks(*quantize_blocks(weight, bits), bits, 64).T + np.arange(24)
    assert np.abs(got - expected).max() < 0.2  # the operator also rounds x, to 8 bits a block


def test_rope_tables_turn_the_first_frequency_once_a_position(folder: Path) -> None:
    cos, sin = rope_tables(load_model_files(folder).config, 10)
    assert cos.shape == (10, 4)
    assert np.allclose(cos[:, 0], np.cos(np.arange(10)), atol=1e-6)
    assert np.allclose(sin[:, -1], np.sin(np.arange(10) * 10000 ** (-6 / 8)), atol=1e-6)
