"""Models from configurations, folders, GGUF headers, ids; files that lie are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surespec import memory
from surespec.errors import FetchError, ModelError, UsageError
from surespec.models import bundled, from_config, from_path, resolve, variants_of
from surespec.models.headers import gguf_metadata, safetensors_bytes

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def safetensors(path: Path, tensors: dict[str, tuple[int, int]], body: int, header_length: int | None = None) -> None:
    header = json.dumps(
        {k: {"dtype": "BF16", "shape": [1], "data_offsets": list(v)} for k, v in tensors.items()}
    ).encode()
    path.write_bytes((header_length or len(header)).to_bytes(8, "little") + header + b"\0" * body)


def gguf(
    path: Path,
    entries: list[tuple[str, int, bytes]],
    *,
    tail: int = 100,
    count: int | None = None,
    tensors: tuple[str, ...] = ("token_embd.weight",),
) -> None:
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count if count is not None else len(entries))
    for key, kind, value in entries:
        data += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value
    for name in tensors:
        data += text(name) + struct.pack("<IQQIQ", 2, 64, 3, 0, 0)
    path.write_bytes(data + b"\0" * tail)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def good_entries() -> list[tuple[str, int, bytes]]:
    u32 = lambda n: struct.pack("<I", n)  # noqa: E731
    tokens = struct.pack("<IQ", 8, 3) + text("a") + text("bb") + text("ccc")
    return [
        ("general.architecture", 8, text("llama")),
        ("general.name", 8, text("Tiny")),
        ("general.file_type", 4, u32(3)),
        ("llama.block_count", 4, u32(2)),
        ("llama.embedding_length", 4, u32(64)),
        ("llama.feed_forward_length", 4, u32(128)),
        ("llama.attention.head_count", 4, u32(4)),
        ("llama.attention.head_count_kv", 4, u32(2)),
        ("llama.context_length", 4, u32(512)),
        ("tokenizer.ggml.tokens", 9, tokens),
    ]


def test_folder_reads_headers_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    safetensors(tmp_path / "model.safetensors", {"a": (0, 60), "b": (60, 100)}, 100)
    model = from_path(tmp_path)
    assert (model.weight_bytes, model.weight_source) == (100, "size of the checkpoint")
    assert memory.kv_bytes_per_token(model) == 2 * 2 * 32 * 2
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    assert from_path(tmp_path).weight_bytes == 12345


def test_a_header_length_beyond_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    safetensors(file, {"a": (0, 4)}, 4, header_length=1 << 62)
    with pytest.raises(ModelError, match="cannot hold"):
        safetensors_bytes(file)


def test_a_cut_safetensors_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    safetensors(file, {"a": (0, 400)}, 4)
    with pytest.raises(ModelError, match="incomplete"):
        safetensors_bytes(file)
    file.write_bytes(b"\x01")
    with pytest.raises(ModelError):
        safetensors_bytes(file)


def test_gguf_header(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    gguf(file, good_entries())
    model = from_path(file)
    assert (model.format, model.quantization, model.vocab_size, model.weight_bytes) == ("gguf", "q4_1", 3, 100)
    assert model.tie_word_embeddings
    gguf(file, good_entries(), tensors=("token_embd.weight", "output.weight"))
    assert not from_path(file).tie_word_embeddings
    assert memory.kv_bytes_per_token(model) == 2 * 2 * 32 * 2


@pytest.mark.parametrize(
    "entries",
    [
        [("k", 8, struct.pack("<Q", 1 << 60))],  # a text longer than the file
        [("k", 9, struct.pack("<IQ", 8, 1 << 60))],  # an array longer than the file
        [("k", 9, struct.pack("<IQ", 4, 4_000_000))],  # plausible, but beyond the end
        [("k", 77, b"")],  # no such type
    ],
)
def test_lying_gguf_lengths_are_refused(tmp_path: Path, entries: list[tuple[str, int, bytes]]) -> None:
    file = tmp_path / "liar.gguf"
    gguf(file, entries)
    with pytest.raises(ModelError, match=r"liar\.gguf"):
        gguf_metadata(file)


def test_gguf_with_an_absurd_number_of_entries(tmp_path: Path) -> None:
    file = tmp_path / "liar.gguf"
    gguf(file, good_entries(), count=1 << 40)
    with pytest.raises(ModelError, match="not readable"):
        gguf_metadata(file)


@pytest.mark.parametrize("cut", [3, 10, 40, 200])
def test_a_cut_gguf_is_refused(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "cut.gguf"
    gguf(file, good_entries())
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ModelError):
        from_path(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_attention_heads": True}, "num_attention_heads"),
    ],
)
def test_nonsense_in_a_config_names_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_config({**TINY, **change}, "x/y")


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
            "w4a16",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}},
            "int8",
        ),
    ],
)
def test_precision_of_a_config(quant: dict[str, Any], expected: str) -> None:
    assert from_config({**TINY, "quantization_config": quant}, "x/y").quantization == expected


@pytest.mark.parametrize(
    ("extra", "kinds"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}, {"full": 1, "sliding": 1}),
        ({"full_attention_interval": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
          "linear_key_head_dim": 8, "linear_value_head_dim": 8}, {"full": 1, "state": 1}),
        ({"hybrid_override_pattern": "M-*-", "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16},
         {"full": 1, "state": 1}),
        ({"sliding_window": 4096, "use_sliding_window": False, "model_type": "qwen2"}, {"full": 2}),
    ],
)  # fmt: skip
def test_layer_kinds(extra: dict[str, Any], kinds: dict[str, int]) -> None:
    model = from_config({**TINY, **extra}, "x/y")
    assert {g.kind: g.layers for g in model.kv_groups} == kinds


def test_text_config_of_a_vision_model_is_used() -> None:
    model = from_config({"architectures": ["VL"], "text_config": TINY, "tie_word_embeddings": True}, "x/y")
    assert (model.num_layers, model.tie_word_embeddings) == (2, True)


def test_aliases_and_variants() -> None:
    canonical = bundled("llama-3.1-8b")
    other = bundled("meta-llama/Meta-Llama-3.1-8B-Instruct")
    assert canonical is not None and other is not None
    assert canonical.id == "meta-llama/Llama-3.1-8B-Instruct"
    assert other.id == "meta-llama/Meta-Llama-3.1-8B-Instruct" and other.weight_bytes == canonical.weight_bytes
    assert {v.quantization for v in variants_of(canonical)} == {"fp8", "nvfp4", "w4a16"}


def test_resolve_prefers_files_then_the_table(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert resolve(str(tmp_path)).hidden_size == 64
    assert resolve("Qwen3-8B").id == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("name", ["", "no-such-model", "./missing", "a/b/c"])
def test_names_that_cannot_be_models(name: str) -> None:
    with pytest.raises(UsageError):
        resolve(name)


def test_unknown_id_without_a_network_says_what_is_bundled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FetchError, match="not bundled") as caught:
        resolve("somebody/unknown-model", offline=True)
    assert "Qwen/Qwen3-8B" in caught.value.hint


def test_gated_repository_names_both_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError

    def refuse(*_: object, **__: object) -> str:
        raise GatedRepoError.__new__(GatedRepoError)  # its constructor wants a response of the HTTP library

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    monkeypatch.setattr("surespec.models.hub._reachable", lambda: True)
    with pytest.raises(ModelError, match="gated") as caught:
        resolve("somebody/gated-model")
    assert "HF_TOKEN" in caught.value.hint and "HUGGING_FACE_HUB_TOKEN" in caught.value.hint


def test_an_unreachable_hub_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import socket

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FetchError, match="cannot be reached"):
        resolve("somebody/unknown-model")


def test_a_hub_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """config.json and the index are read; the base model comes from the card."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    (tmp_path / "config.json").write_text(json.dumps({**TINY, "quantization_config": {"quant_method": "fp8"}}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 777}}))

    def download(_: str, name: str, **__: object) -> str:
        if not (tmp_path / name).exists():
            raise EntryNotFoundError.__new__(EntryNotFoundError)
        return str(tmp_path / name)

    class Info:
        card_data: dict[str, object] = {"base_model": ["meta-llama/Llama-3.1-8B-Instruct"]}  # noqa: RUF012

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "model_info", lambda _: Info())
    monkeypatch.setattr("surespec.models.hub._reachable", lambda: True)
    model = resolve("someone/tiny-fp8")
    assert (model.id, model.quantization, model.weight_bytes) == ("someone/tiny-fp8", "fp8", 777)
    assert model.target_of == ("meta-llama/Llama-3.1-8B-Instruct",)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=300),
    prefix=st.sampled_from([b"", b"GGUF", b"GGUF\x03\0\0\0", b"GGUF\x03\0\0\0" + b"\1" + b"\0" * 7]),
)
def test_any_bytes_are_a_model_error_and_nothing_else(tmp_path: Path, data: bytes, prefix: bytes) -> None:
    for name in ("x.gguf", "x.safetensors"):
        file = tmp_path / name
        file.write_bytes(prefix + data)
        try:
            from_path(file) if name.endswith("gguf") else safetensors_bytes(file)
        except ModelError as error:
            assert name in str(error)
