"""A GGUF file -> ``ModelFiles``: llama.cpp's keys and tensor names turned into Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from surespec.errors import ModelError
from surespec.local.gguf_file import TYPES, GgufFile
from surespec.local.types import FloatArray, ModelConfig
from surespec.local.weights import (
    SUPPORTED,
    GgufVocab,
    LazyTensors,
    ModelFiles,
    check_config,
    check_shapes,
    expected_shapes,
    llama3_frequency_scale,
)

SCALING_HINT = "Use the safetensors form of this model, whose config.json states the scaling."
ARCHITECTURES = ("llama", "qwen2", "qwen3")
GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """The GGUF name of the tensor that Hugging Face calls ``name``."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def undo_rope_permutation(rows: FloatArray, num_heads: int) -> FloatArray:
    """Rows of q or k from llama.cpp's interleaved rotary order back to Hugging Face's halves.

    For architecture ``llama``, llama.cpp's converter stores the pair (i, i + d/2) of each head as neighbours.
    """
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


class _Header:
    """Typed access to a GGUF's metadata under the architecture's prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer ``<architecture>.<key>``."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int):
            what = "is missing" if value is None else f"must be a whole number, not {value!r}"
            raise ModelError(f"{self.file.path}: '{self.architecture}.{key}' {what}.", hint="Fetch the file again.")
        return value

    def number(self, key: str, default: float) -> float:
        """The number ``<architecture>.<key>``."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.file.path}: '{self.architecture}.{key}' must be a number, not {value!r}.")
        return float(value)


def _config(file: GgufFile) -> ModelConfig:
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture '{architecture}' is not supported; the embedded engine reads {SUPPORTED}.",
            hint="Serve this model with llama.cpp and point surespec at it with --endpoint.",
        )
    header = _Header(file, architecture)
    if header.integer("expert_count", 0):
        raise ModelError(f"{file.path}: mixture-of-experts models are not supported by the embedded engine.")
    scaling_type = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling_type != "none":
        raise ModelError(f"{file.path}: rope scaling '{scaling_type}' is not supported.", hint=SCALING_HINT)
    hidden, heads = header.integer("embedding_length"), header.integer("attention.head_count")
    head_dim = header.integer("attention.key_length", hidden // max(heads, 1))
    if header.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path}: partial rotary positions are not supported.")
    theta = header.number("rope.freq_base", 10000.0)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    embedding = file.tensors.get("token_embd.weight")
    vocab = embedding.shape[0] if embedding else len(tokens or ())
    eos = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=header.integer("feed_forward_length"),
        num_layers=header.integer("block_count"),
        num_heads=heads,
        num_kv_heads=header.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=header.integer("context_length"),
        rope_theta=theta,
        rms_norm_eps=_round_eps(header.number("attention.layer_norm_rms_epsilon", 1e-6)),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=tuple(dict.fromkeys(e for e in eos if isinstance(e, int))),
        attention_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        rope_scaling=_llama3_scaling(file, head_dim, theta),
    )
    return check_config(config, file.path)


def _llama3_scaling(file: GgufFile, head_dim: int, theta: float) -> dict[str, float] | None:
    """Llama-3's scaling, which llama.cpp's converter stores as one divisor a frequency (``rope_freqs.weight``).

    All published Llama 3 models share the other three parameters, so only the factor is read, and the divisors must
    then come out as stored. ModelError when they do not.
    """
    if "rope_freqs.weight" not in file.tensors:
        return None
    divisors = file.read("rope_freqs.weight").reshape(-1)
    scaling = {"factor": float(divisors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192.0
    inverse = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if divisors.shape != inverse.shape or not np.allclose(
        1.0 / llama3_frequency_scale(inverse, scaling), divisors, rtol=1e-3
    ):
        raise ModelError(f"{file.path}: 'rope_freqs.weight' is not Llama 3's scaling.", hint=SCALING_HINT)
    return scaling


def _round_eps(value: float) -> float:
    """GGUF holds the epsilon as fp32 (1e-5 reads as 9.9999997e-06); give back the decimal that was meant."""
    return float(f"{value:.6g}")


def _vocab(file: GgufFile) -> GgufVocab | None:
    meta = file.metadata
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return None
    types = meta.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        types = [1] * len(tokens)
    return GgufVocab(
        model=str(meta.get("tokenizer.ggml.model", "")),
        pre=str(meta.get("tokenizer.ggml.pre", "default")),
        tokens=tuple(tokens),
        token_types=tuple(types),
        merges=tuple(meta.get("tokenizer.ggml.merges") or ()),
        add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", False)),
    )


def load_gguf(path: Path) -> ModelFiles:
    """Open a GGUF file. Raises ModelError as ``weights.load_model_files`` says."""
    file = GgufFile(path)
    config = _config(file)
    wanted = expected_shapes(config)
    names = {name: gguf_name(name) for name in wanted}
    found = {name: file.tensors[stored].shape for name, stored in names.items() if stored in file.tensors}
    check_shapes(found, wanted, path)
    for stored in names.values():
        if file.tensors[stored].type_name not in TYPES:
            file.read(stored)  # raises, naming the type, before any work is done
    readers = {name: _reader(file, name, stored, config) for name, stored in names.items()}
    vocab = _vocab(file)
    template = file.metadata.get("tokenizer.chat_template")
    return ModelFiles(
        path=path,
        config=config,
        tensors=LazyTensors(readers, path),
        tokenizer_path=None,
        gguf_vocab=vocab,
        chat_template=template if isinstance(template, str) else None,
        bos_token=_token_text(vocab, config.bos_token_id),
        eos_token=_token_text(vocab, config.eos_token_ids[0] if config.eos_token_ids else None),
    )


def _token_text(vocab: GgufVocab | None, token_id: int | None) -> str:
    if vocab is None or token_id is None or not 0 <= token_id < len(vocab.tokens):
        return ""
    return vocab.tokens[token_id]


def _reader(file: GgufFile, name: str, stored: str, config: ModelConfig) -> Callable[[], FloatArray]:
    heads = 0
    if config.architecture == "llama":
        part = name.split(".")[-2]
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(part, 0)
    if heads:
        return lambda: undo_rope_permutation(file.read(stored), heads)
    return lambda: file.read(stored)
