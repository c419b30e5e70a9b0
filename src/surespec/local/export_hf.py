"""A GGUF model as a Hugging Face folder, for engines that read nothing else (vLLM, SGLang, transformers).

Weights are written in fp32: the dequantised values exactly, so that every engine serves the same function.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from surespec.errors import FetchError
from surespec.local.tokenizer import load_tokenizer
from surespec.local.types import ModelConfig
from surespec.local.weights import ModelFiles, load_model_files

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def gguf_to_hf(gguf: Path, folder: Path) -> None:
    """Write ``folder`` (config, weights, tokenizer, chat template) from a GGUF file; it appears whole or not at all.

    Raises ModelError for a GGUF that cannot be read and FetchError when the folder cannot be written.
    """
    files = load_model_files(gguf)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _write(files, scratch)
            scratch.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            scratch.replace(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as exc:
        raise FetchError(f"{folder} cannot be written: {exc.strerror}.", hint="Free some disk space.") from exc


def _write(files: ModelFiles, folder: Path) -> None:
    """Every file of the folder; the weights last."""
    _json(folder / "config.json", _config(files.config))
    _json(folder / "generation_config.json", _token_ids(files.config))
    _json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": files.bos_token or None,
            "eos_token": files.eos_token or None,
            "pad_token": files.eos_token or None,
            "model_max_length": files.config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": files.chat_template,
        },
    )
    load_tokenizer(files).save(folder / "tokenizer.json")
    tensors = {name: files.tensors[name] for name in files.tensors}
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # the library writes it for the owner alone; a container may run as another user


def _config(config: ModelConfig) -> dict[str, Any]:
    """``config.json`` as transformers and vLLM read it."""
    return {
        "architectures": [_ARCHITECTURES[config.architecture]],
        "model_type": config.architecture,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "torch_dtype": "float32",
        **_token_ids(config),
    }


def _token_ids(config: ModelConfig) -> dict[str, Any]:
    """Begin, end and padding ids."""
    end = list(config.eos_token_ids)
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": end[0] if len(end) == 1 else end,
        "pad_token_id": end[0] if end else None,
    }


def _json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
