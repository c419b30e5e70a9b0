"""Tiny random models, GGUF files and EAGLE-3 heads for tests: real file formats, made in milliseconds from a seed.

The toy vocabulary is a byte-level BPE: three special tokens (``<|endoftext|>``, ``<|im_start|>``, ``<|im_end|>``),
the 256 bytes, a few merges, then filler tokens up to ``vocab``. ``vocab`` must be at least 273.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "i n", "Ġ t", "Ġ the", "a n", "an d", "Ġ a", "e r", "o n", "r e", "Ġ s", "l l", "Ġ w")
MIN_VOCAB = len(SPECIALS) + 256 + len(MERGES)
Weights = dict[str, NDArray[np.float32]]


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of GPT-2's byte-level BPE, in byte order."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(extra)) for b in range(256)]


def vocabulary(vocab: int) -> list[str]:
    """All token strings by id."""
    if vocab < MIN_VOCAB:
        raise ValueError(f"a toy vocabulary needs at least {MIN_VOCAB} tokens, not {vocab}")
    tokens = [*SPECIALS, *byte_alphabet(), *(m.replace(" ", "") for m in MERGES)]
    return tokens + [f"<unused{i}>" for i in range(vocab - len(tokens))]


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write tokenizer.json and tokenizer_config.json (with a ChatML template)."""
    tokens = vocabulary(vocab)
    added = [
        {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for i, t in enumerate(SPECIALS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": [m.split() for m in MERGES]}
    document = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    document |= {"pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _config(family: str, **given: Any) -> dict[str, Any]:
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    config: dict[str, Any] = {
        "architectures": [names[family]],
        "model_type": family,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config | given


def random_weights(config: dict[str, Any], seed: int) -> Weights:
    """Weights under Hugging Face's names, scaled so that the activations stay near one and answers vary."""
    rng = np.random.default_rng(seed)
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_out = config["num_attention_heads"] * config["head_dim"]
    kv_out = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, cols: int, gain: float = 1.0) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, cols)) * gain / np.sqrt(cols)).astype(np.float32)

    def norm(size: int) -> NDArray[np.float32]:
        return (1.0 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    weights: Weights = {"model.embed_tokens.weight": rng.standard_normal((vocab, hidden)).astype(np.float32)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes = {"q_proj": (q_out, hidden), "k_proj": (kv_out, hidden), "v_proj": (kv_out, hidden)}
        for name, shape in shapes.items():
            weights[f"{at}self_attn.{name}.weight"] = matrix(*shape, gain=1.5)
            if config["model_type"] == "qwen2":
                weights[f"{at}self_attn.{name}.bias"] = (0.5 * rng.standard_normal(shape[0])).astype(np.float32)
        if config["model_type"] == "qwen3":
            weights[at + "self_attn.q_norm.weight"] = norm(config["head_dim"])
            weights[at + "self_attn.k_norm.weight"] = norm(config["head_dim"])
        weights[at + "self_attn.o_proj.weight"] = matrix(hidden, q_out, gain=2.0)
        weights[at + "mlp.gate_proj.weight"] = matrix(inter, hidden)
        weights[at + "mlp.up_proj.weight"] = matrix(inter, hidden)
        weights[at + "mlp.down_proj.weight"] = matrix(hidden, inter, gain=2.0)
        weights[at + "input_layernorm.weight"] = norm(hidden)
        weights[at + "post_attention_layernorm.weight"] = norm(hidden)
    weights["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocab, hidden, gain=3.0)
    return weights


def _make(
    folder: Path,
    family: str,
    *,
    vocab: int = 320,
    hidden: int = 32,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    intermediate: int = 64,
    tie: bool = False,
    seed: int = 0,
    **extra: Any,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shape = {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    shape |= {"num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": intermediate}
    config = _config(family, **shape, tie_word_embeddings=tie, **extra)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(random_weights(config, seed), folder / "model.safetensors")
    write_tokenizer(folder, vocab)
    return folder


def make_llama(folder: Path, **shape: Any) -> Path:
    """Write a random Llama (config.json, model.safetensors, tokenizer files) into ``folder`` and return it.

    ``shape``: vocab=320, hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, intermediate=64, tie=False, seed=0, and
    any further key of config.json (``max_position_embeddings=512`` ...).
    """
    return _make(folder, "llama", **shape)


def make_qwen2(folder: Path, **shape: Any) -> Path:
    """Like ``make_llama``, with Qwen2's q/k/v biases."""
    return _make(folder, "qwen2", **shape)


def make_qwen3(folder: Path, **shape: Any) -> Path:
    """Like ``make_llama``, with Qwen3's q/k norms and an explicit head_dim (12: not hidden / heads)."""
    return _make(folder, "qwen3", **({"head_dim": 12} | shape))


_GGUF_NAMES = {
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
_GGUF_GLOBALS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _gguf_name(name: str) -> str:
    if name in _GGUF_GLOBALS:
        return _GGUF_GLOBALS[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"


def make_gguf(
    path: Path,
    folder: Path,
    *,
    qtype: str = "F32",
    pre: str = "smollm",
    template: bool = True,
    rope_divisors: NDArray[np.float32] | None = None,
) -> Path:
    """Write the toy model in ``folder`` as a GGUF file at ``path``.

    ``qtype``: storage of the matrices (F32, F16, BF16, Q8_0, Q4_0, Q4_1; rows must be whole blocks). q and k of a Llama
    are permuted as llama.cpp's converter does.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = vocabulary(config["vocab_size"])
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < len(SPECIALS) else 1 for i in range(len(tokens))])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if template:
        writer.add_chat_template(CHAT_TEMPLATE)
    kind = gguf.GGMLQuantizationType[qtype]
    for name, tensor in load_file(folder / "model.safetensors").items():
        part = name.split(".")[-2]
        if family == "llama" and part in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if part == "q_proj" else "num_key_value_heads"]
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        stored = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        if stored == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(tensor))
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(tensor), stored)
            writer.add_tensor(_gguf_name(name), packed, raw_dtype=stored)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_eagle3_head(
    folder: Path,
    target: Path,
    *,
    draft_vocab: int = 200,
    seed: int = 7,
    own_embedding: bool = False,
    own_lm_head: bool = True,
    prefix: str = "midlayer.",
    **overrides: Any,
) -> Path:
    """Write a random EAGLE-3 head for the toy target folder ``target``, in the layout vLLM loads.

    ``draft_vocab`` equal to the target's vocabulary leaves out ``d2t`` and ``t2d``; ``own_lm_head=False`` shares the
    target's head (needs the full vocabulary). ``overrides`` go into config.json (``hidden_size=48``: a misfit).
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = json.loads((target / "config.json").read_text())
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config = {k: base[k] for k in (*keys, "rms_norm_eps", "rope_theta", "max_position_embeddings")}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"draft_vocab_size": draft_vocab, "tie_word_embeddings": False} | overrides
    layers = base["num_hidden_layers"]
    config.setdefault("eagle_aux_hidden_state_layer_ids", [min(2, layers - 1), layers // 2, max(layers - 3, 0)])
    hidden, vocab, head_dim = config["hidden_size"], config["vocab_size"], config["head_dim"]
    shape = config | {"num_hidden_layers": 1, "model_type": "llama", "tie_word_embeddings": True}
    weights = random_weights(shape, seed)
    rng = np.random.default_rng(seed + 1)
    head: dict[str, NDArray[Any]] = {}
    for name, tensor in weights.items():
        if name.startswith("model.layers.0."):
            rest = name.removeprefix("model.layers.0.")
            if rest.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
                out = {"q_proj": config["num_attention_heads"]}.get(rest.split(".")[-2], config["num_key_value_heads"])
                tensor = rng.standard_normal((out * head_dim, 2 * hidden)).astype(np.float32) / np.sqrt(hidden)
            head[prefix + rest] = tensor.astype(np.float32)
    head[prefix + "hidden_norm.weight"] = np.ones(hidden, np.float32)
    head["norm.weight"] = weights["model.norm.weight"]
    head["fc.weight"] = (rng.standard_normal((hidden, 3 * hidden)) / np.sqrt(3 * hidden)).astype(np.float32)
    if own_lm_head:
        head["lm_head.weight"] = rng.standard_normal((draft_vocab, hidden)).astype(np.float32)
    if own_embedding:
        head["embed_tokens.weight"] = rng.standard_normal((vocab, hidden)).astype(np.float32)
    if draft_vocab != vocab:
        chosen = np.sort(rng.choice(vocab, draft_vocab, replace=False)).astype(np.int64)
        head["d2t"] = chosen - np.arange(draft_vocab)
        head["t2d"] = np.isin(np.arange(vocab), chosen)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(head, folder / "model.safetensors")
    return folder
