"""Model files: what is read, and one clear sentence for every way a file can be broken."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import toy
from surespec.errors import ModelError
from surespec.local.gguf_file import GgufFile
from surespec.local.gguf_weights import undo_rope_permutation
from surespec.local.weights import load_model_files

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return toy.make_llama(tmp_path / "llama")


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model_files(path)
    return str(caught.value)


@pytest.mark.parametrize("make", [toy.make_llama, toy.make_qwen2, toy.make_qwen3])
def test_a_folder_and_its_gguf_hold_the_same_model(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    plain, packed = load_model_files(folder), load_model_files(toy.make_gguf(tmp_path / "m.gguf", folder))
    assert packed.config == plain.config
    assert packed.chat_template == plain.chat_template == toy.CHAT_TEMPLATE
    assert (packed.bos_token, packed.eos_token) == (plain.bos_token, plain.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert set(packed.tensors) == set(plain.tensors)
    for name in plain.tensors:
        assert np.array_equal(packed.tensors[name], plain.tensors[name]), name
    assert packed.tokenizer_path is None
    assert packed.gguf_vocab is not None


@pytest.mark.parametrize(
    ("qtype", "error"), [("F16", 5e-3), ("BF16", 3e-2), ("Q8_0", 3e-2), ("Q4_0", 0.6), ("Q4_1", 0.4)]
)
def test_quantised_gguf_tensors_come_out_near_the_original(
    qtype: str, error: float, folder: Path, tmp_path: Path
) -> None:
    plain = load_model_files(folder)
    packed = load_model_files(toy.make_gguf(tmp_path / "m.gguf", folder, qtype=qtype))
    difference = np.abs(packed.tensors[Q_PROJ] - plain.tensors[Q_PROJ]).max()
    assert 0 < difference < error


def test_the_rope_permutation_is_undone() -> None:
    rows = np.arange(2 * 6 * 3, dtype=np.float32).reshape(12, 3)
    stored = rows.reshape(2, 2, 3, 3).swapaxes(1, 2).reshape(12, 3)
    assert not np.array_equal(stored, rows)
    assert np.array_equal(undo_rope_permutation(stored, 2), rows)


def test_tied_embeddings_and_several_end_tokens(tmp_path: Path) -> None:
    folder = toy.make_llama(tmp_path / "m", tie=True)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    files = load_model_files(folder)
    assert files.config.tie_word_embeddings
    assert files.config.eos_token_ids == (2, 0)
    assert load_model_files(toy.make_gguf(tmp_path / "m.gguf", folder)).config.tie_word_embeddings


@pytest.mark.parametrize(("kind", "error"), [(np.float16, 1e-3), (ml_dtypes.bfloat16, 1e-2)])
def test_half_precision_safetensors(kind: type, error: float, folder: Path) -> None:
    original = load_file(folder / "model.safetensors")
    halves = {k: v.astype(kind) for k, v in original.items()}
    save_file(halves, folder / "model.safetensors")
    tensor = load_model_files(folder).tensors[Q_PROJ]
    assert tensor.dtype == np.float32
    assert np.array_equal(tensor, halves[Q_PROJ].astype(np.float32))
    assert 0 < np.abs(tensor - original[Q_PROJ]).max() < error


def test_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    index = {"weight_map": {n: file for file, part in halves.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    files = load_model_files(folder)
    assert all(np.array_equal(files.tensors[n], tensors[n]) for n in names)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors cannot be opened" in refusal(folder)


def test_llama3_rope_scaling_is_read_and_others_refused(folder: Path) -> None:
    edit_config(folder, rope_scaling={"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 256})
    assert load_model_files(folder).config.rope_scaling == {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256.0,
    }
    edit_config(folder, rope_scaling={"type": "yarn", "factor": 4.0})
    assert "rope scaling 'yarn' is not supported" in refusal(folder)


def test_nothing_there(tmp_path: Path) -> None:
    assert "No model at" in refusal(tmp_path / "none")
    assert "surespec fetch" in refusal(tmp_path / "none")
    assert "has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM' is not supported"),
        ({"hidden_size": "big"}, "'hidden_size' must be a whole number, not 'big'"),
        ({"num_hidden_layers": None}, "has no 'num_hidden_layers'"),
        ({"num_hidden_layers": 10**9}, "number of layers is 1000000000"),
        ({"num_hidden_layers": 5}, "no tensor 'model.layers.4."),
        ({"num_attention_heads": 3}, "3 heads cannot be shared by 2 KV heads"),
        ({"head_dim": 7}, "head dimension is 7"),
        (
            {"vocab_size": 321},
            "'model.embed_tokens.weight' has shape (320, 32), but the configuration asks for (321, 32)",
        ),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' must be a number"),
        ({"attention_bias": True}, "biases"),
    ],
)
def test_a_configuration_that_does_not_fit(changes: dict[str, object], message: str, folder: Path) -> None:
    edit_config(folder, **changes)
    assert message in refusal(folder)


def test_broken_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read as JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "must hold a JSON object, not a list" in refusal(folder)


def test_only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "'pytorch_model.bin' is a pickle" in refusal(folder)


def rewritten(path: Path, header: object, keep: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + keep)


def test_safetensors_that_lie(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert "but the file holds" in refusal(folder)
    path.write_bytes(struct.pack("<Q", 10**15) + whole[8:])
    assert "its header claims 1000000000000000 bytes" in refusal(folder)
    path.write_bytes(b"")
    assert "is 0 bytes long" in refusal(folder)
    path.write_bytes(struct.pack("<Q", 4) + b"nope")
    assert "its header is not JSON" in refusal(folder)
    rewritten(path, {Q_PROJ: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 4]}}, b"\0" * 4)
    assert f"tensor '{Q_PROJ}' of shape (2, 2) and type F32 needs 16 bytes, but 4 are stored" in refusal(folder)
    rewritten(path, {Q_PROJ: {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"\0" * 4)
    assert "impossible shape" in refusal(folder)
    rewritten(path, {Q_PROJ: 3})
    assert "has no dtype, shape or offsets" in refusal(folder)


def test_an_8_bit_float_type_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[Q_PROJ] = tensors[Q_PROJ].astype(ml_dtypes.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"'{Q_PROJ}' has type F8_E4M3"):
        load_model_files(folder).tensors[Q_PROJ]


@pytest.fixture
def gguf_bytes(folder: Path, tmp_path: Path) -> bytes:
    return toy.make_gguf(tmp_path / "good.gguf", folder).read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.0001, 0.01, 0.03, 0.1, 0.5, 0.99, 0.9999])
def test_a_gguf_cut_off_anywhere(share: float, gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_bytes[: int(len(gguf_bytes) * share)])
    message = refusal(path)
    assert "cut.gguf" in message
    assert any(word in message for word in ("ends at byte", "more than the file can hold", "is not a GGUF file"))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (4, struct.pack("<I", 99), "GGUF version 99 is not supported"),
        (8, struct.pack("<Q", 2**60), "tensor count is 1152921504606846976, more than the file can hold"),
        (16, struct.pack("<Q", 2**60), "metadata count is 1152921504606846976, more than the file can hold"),
        (24, struct.pack("<Q", 2**40), "the length of a metadata key is 1099511627776"),
    ],
)
def test_a_gguf_whose_header_lies(at: int, value: bytes, message: str, gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lie.gguf"
    path.write_bytes(gguf_bytes[:at] + value + gguf_bytes[at + len(value) :])
    assert message in refusal(path)


def test_random_damage_to_a_gguf_header_never_escapes_as_another_error(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(gguf_bytes)
        for at in rng.integers(4, 9000, 3):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            load_model_files(path)
        except ModelError as error:
            refused += 1
            assert "damaged.gguf" in str(error)
    assert refused > 10


def change_gguf(gguf_bytes: bytes, old: bytes, new: bytes, path: Path) -> Path:
    assert len(old) == len(new)
    assert old in gguf_bytes
    path.write_bytes(gguf_bytes.replace(old, new))
    return path


def test_a_gguf_of_another_kind(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    assert "architecture 'gemma' is not supported" in refusal(change_gguf(gguf_bytes, b"llama", b"gemma", path))
    missing = change_gguf(gguf_bytes, b"llama.block_count", b"llama.block_xxxxx", path)
    assert "'llama.block_count' is missing" in refusal(missing)
    renamed = change_gguf(gguf_bytes, b"blk.3.ffn_up.weight", b"blk.3.ffn_xx.weight", path)
    assert "no tensor 'model.layers.3.mlp.up_proj.weight'" in refusal(renamed)


def test_a_gguf_tensor_type_that_is_not_supported(tmp_path: Path) -> None:
    folder = toy.make_llama(tmp_path / "m", hidden=32)
    path = toy.make_gguf(tmp_path / "m.gguf", folder, qtype="Q5_0")
    message = refusal(path)
    assert "has type Q5_0, which is not supported" in message
    assert "Q4_K" in message


@pytest.mark.parametrize("qtype", ["Q4_K", "Q6_K"])
def test_k_quants_are_read_as_the_gguf_package_reads_them(qtype: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[qtype]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(0, 60, (5, 2 * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GgufFile(tmp_path / "k.gguf").read("w")
    assert tensor.shape == (5, 2 * block)
    assert np.array_equal(tensor, gguf.dequantize(raw, kind))
    assert np.unique(tensor).size > 100


def test_llama3_rope_divisors_of_a_gguf(tmp_path: Path) -> None:
    folder = toy.make_llama(tmp_path / "m", rope_theta=500000.0, head_dim=64)
    # The divisors of Llama 3.1 (head size 64, factor 8), as its GGUF files hold them, from the definition.
    wavelength = 2 * np.pi * 500000.0 ** (np.arange(0, 64, 2) / 64)
    smooth = (8192 / wavelength - 1) / 3
    divisors = np.where(wavelength < 2048, 1, np.where(wavelength > 8192, 8, 1 / ((1 - smooth) / 8 + smooth)))
    path = toy.make_gguf(tmp_path / "m.gguf", folder, rope_divisors=divisors.astype(np.float32))
    scaling = load_model_files(path).config.rope_scaling
    assert scaling is not None
    assert scaling["factor"] == 8.0
    other = toy.make_gguf(tmp_path / "o.gguf", folder, rope_divisors=np.linspace(1, 9, 32, dtype=np.float32))
    assert "'rope_freqs.weight' is not Llama 3's scaling" in refusal(other)
