"""Model files on disk -> one ``ModelFiles``: configuration, tensors under Hugging Face's names, tokenizer, template.

Two forms are read: a GGUF file (``gguf_weights``) and a folder with ``config.json`` and ``*.safetensors``. Tensors are
read lazily from a memory map, one at a time, as fp32: the whole model never lies in memory twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surespec.errors import ModelError
from surespec.json_text import loads_json
from surespec.local.safetensors_file import SafetensorsFile
from surespec.local.types import FloatArray, ModelConfig

FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
SUPPORTED = "Llama, SmolLM2, Qwen2 and Qwen3"
MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """The tokenizer as a GGUF header holds it. ``token_types``: 1 normal, 3 control, 4 user defined, 6 byte."""

    model: str
    pre: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    add_bos: bool = False


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk. Exactly one of ``tokenizer_path`` and ``gguf_vocab`` is set when there is a tokenizer at all.

    ``tensors`` yields fp32 arrays under Hugging Face's Llama names, matrices as (out, in). ``bos_token`` and
    ``eos_token`` are the strings a chat template may ask for ("" when unknown).
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, FloatArray]
    tokenizer_path: Path | None
    gguf_vocab: GgufVocab | None
    chat_template: str | None
    bos_token: str = ""
    eos_token: str = ""


class LazyTensors(Mapping[str, FloatArray]):
    """Name -> fp32 array, read anew at each access (nothing is kept)."""

    def __init__(self, readers: dict[str, Callable[[], FloatArray]], path: Path) -> None:
        self._readers = readers
        self._path = path

    def __getitem__(self, name: str) -> FloatArray:
        """The tensor ``name``; ModelError when the file does not hold it."""
        if name not in self._readers:
            raise ModelError(f"{self._path} has no tensor '{name}'.", hint="The file is incomplete; fetch it again.")
        return self._readers[name]()

    def __contains__(self, name: object) -> bool:
        """Whether the file holds ``name`` (without reading it)."""
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        """The names, in file order."""
        return iter(self._readers)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self._readers)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a model of this configuration must hold, with its shape."""
    hidden, inter = config.hidden_size, config.intermediate_size
    q_out, kv_out = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_out, hidden),
        "self_attn.k_proj.weight": (kv_out, hidden),
        "self_attn.v_proj.weight": (kv_out, hidden),
        "self_attn.o_proj.weight": (hidden, q_out),
        "mlp.gate_proj.weight": (inter, hidden),
        "mlp.up_proj.weight": (inter, hidden),
        "mlp.down_proj.weight": (hidden, inter),
    }
    if config.attention_bias:
        sizes = {"q": q_out, "k": kv_out, "v": kv_out}
        layer |= {f"self_attn.{x}_proj.bias": (size,) for x, size in sizes.items()}
    if config.qk_norm:
        layer |= {f"self_attn.{x}_norm.weight": (config.head_dim,) for x in "qk"}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_shapes(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raise ModelError for the first tensor that is missing or of another shape, naming it and both shapes."""
    for name, shape in wanted.items():
        if name not in found:
            raise ModelError(f"{path} has no tensor '{name}'.", hint="The file is incomplete; fetch it again.")
        if tuple(found[name]) != shape:
            raise ModelError(
                f"{path}: tensor '{name}' has shape {tuple(found[name])}, but the configuration asks for {shape}.",
                hint="The weights and the configuration do not belong together; fetch the model again.",
            )


def check_config(config: ModelConfig, path: Path) -> ModelConfig:
    """Raise ModelError for sizes no model can have; return ``config``."""
    sizes = {
        "hidden size": config.hidden_size,
        "intermediate size": config.intermediate_size,
        "number of layers": config.num_layers,
        "number of heads": config.num_heads,
        "number of KV heads": config.num_kv_heads,
        "head dimension": config.head_dim,
        "vocabulary size": config.vocab_size,
        "context length": config.max_position_embeddings,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ModelError(f"{path}: the {name} is {value}; it must be at least 1.")
    if config.num_layers > MAX_LAYERS:
        raise ModelError(f"{path}: the number of layers is {config.num_layers}; at most {MAX_LAYERS} can be real.")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{path}: {config.num_heads} heads cannot be shared by {config.num_kv_heads} KV heads.")
    if config.head_dim % 2:
        raise ModelError(f"{path}: the head dimension is {config.head_dim}; rotary positions need an even one.")
    return config


def load_model_files(path: Path) -> ModelFiles:
    """Open the model at ``path``: a GGUF file, or a folder with config.json and *.safetensors.

    Raises ModelError when nothing is there, the family or a tensor type is not supported, or a file is cut off, lies
    about its sizes, or lacks a tensor.
    """
    if not path.exists():
        raise ModelError(
            f"No model at {path}.",
            hint="Give a GGUF file or a folder with config.json and *.safetensors, or run: surespec fetch smollm2-135m",
        )
    if path.is_dir():
        return _load_folder(path)
    from surespec.local.gguf_weights import load_gguf

    return load_gguf(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; ModelError when it is missing, broken, or not an object."""
    try:
        value = loads_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.", hint="Fetch the model again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


class Fields:
    """Typed access to a config.json, so that a wrong type is a sentence and not a traceback."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self.raw = raw
        self.path = path

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer at ``key`` (a null counts as absent)."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.path} has no '{key}'.", hint="Fetch the model again.")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.path}: '{key}' must be a whole number, not {value!r}.")
        return value

    def number(self, key: str, default: float) -> float:
        """The number at ``key``."""
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.path}: '{key}' must be a number, not {value!r}.")
        return float(value)


def rope_settings(raw: Mapping[str, Any], fields: Fields) -> tuple[float, dict[str, float] | None]:
    """(theta, Llama-3 scaling or None) from ``rope_theta`` and ``rope_scaling``, or the newer ``rope_parameters``."""
    nested = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(nested, dict):
        raise ModelError(f"{fields.path}: 'rope_scaling' must be an object, not {nested!r}.")
    inner = Fields(nested, fields.path)
    theta = inner.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(
            f"{fields.path}: rope scaling '{kind}' is not supported; only 'llama3' is.",
            hint="Use a model without rope scaling, or serve it with another engine.",
        )
    defaults = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {key: inner.number(key, value) for key, value in defaults.items()}
    scaling["original_max_position_embeddings"] = inner.number("original_max_position_embeddings", 8192.0)
    return theta, scaling


def llama3_frequency_scale(inverse: NDArray[np.float64], scaling: Mapping[str, float]) -> NDArray[np.float64]:
    """What Llama-3's scaling multiplies each rotary frequency (radians a token) by (Llama 3.1 model card).

    Frequencies whose wavelength exceeds ``original / low_freq_factor`` are divided by ``factor``, those below
    ``original / high_freq_factor`` stay, and between them both are blended.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    scale: NDArray[np.float64] = keep + (1.0 - keep) / scaling["factor"]
    return scale


def config_from_json(raw: Mapping[str, Any], path: Path, generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """A ``ModelConfig`` from a Hugging Face config.json (and generation_config.json for further end tokens)."""
    fields = Fields(raw, path)
    listed = raw.get("architectures")
    architecture = listed[0] if isinstance(listed, list) and listed else "none named"
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise ModelError(
            f"{path}: architecture '{architecture}' is not supported; the embedded engine reads {SUPPORTED}.",
            hint="Serve this model with vLLM or llama.cpp and point surespec at it with --endpoint.",
        )
    family = FAMILIES[architecture]
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: activation '{raw['hidden_act']}' is not supported; only 'silu' is.")
    if raw.get("mlp_bias") or (family != "qwen2" and raw.get("attention_bias")):
        raise ModelError(f"{path}: biases on the output or MLP projections are not supported for {architecture}.")
    if raw.get("use_sliding_window"):
        raise ModelError(f"{path}: sliding-window attention is not supported.")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    theta, scaling = rope_settings(raw, fields)
    config = ModelConfig(
        architecture=family,  # type: ignore[arg-type]
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // max(heads, 1)),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        rope_theta=theta,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_token_id=_first_id(raw.get("bos_token_id")),
        eos_token_ids=_all_ids(raw.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        attention_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope_scaling=scaling,
    )
    return check_config(config, path)


def _all_ids(*values: object) -> tuple[int, ...]:
    """Distinct token ids out of ints, lists of ints and nulls, in order."""
    found: list[int] = []
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool) and item not in found:
                found.append(item)
    return tuple(found)


def _first_id(value: object) -> int | None:
    ids = _all_ids(value)
    return ids[0] if ids else None


def open_safetensors(folder: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the open file that holds it, for a folder's single or sharded *.safetensors."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no 'weight_map'.", hint="Fetch the model again.")
        names = sorted({str(value) for value in weight_map.values()})
        paths = [folder / Path(name).name for name in names]
    elif single.exists():
        paths = [single]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = [p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))]
        why = f"; '{sorted(pickled)[0]}' is a pickle, which can run code and is never opened" if pickled else ""
        raise ModelError(f"{folder} holds no *.safetensors{why}.", hint="Use a safetensors or GGUF form of the model.")
    where: dict[str, SafetensorsFile] = {}
    for path in paths:
        file = SafetensorsFile(path)
        where |= dict.fromkeys(file.shapes, file)
    return where


def _load_folder(folder: Path) -> ModelFiles:
    if not (folder / "config.json").exists():
        raise ModelError(f"{folder} has no config.json.", hint="Give a model folder as Hugging Face lays it out.")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    config = config_from_json(read_json(folder / "config.json"), folder / "config.json", generation)
    where = open_safetensors(folder)
    check_shapes({name: file.shapes[name] for name, file in where.items()}, expected_shapes(config), folder)
    readers = {name: _reader(file, name) for name, file in where.items()}
    template, strings = _tokenizer_settings(folder)
    tokenizer = folder / "tokenizer.json"
    return ModelFiles(
        path=folder,
        config=config,
        tensors=LazyTensors(readers, folder),
        tokenizer_path=tokenizer if tokenizer.exists() else None,
        gguf_vocab=None,
        chat_template=template,
        bos_token=strings.get("bos_token", ""),
        eos_token=strings.get("eos_token", ""),
    )


def _reader(file: SafetensorsFile, name: str) -> Callable[[], FloatArray]:
    return lambda: np.asarray(file.read_float32(name))


def _tokenizer_settings(folder: Path) -> tuple[str | None, dict[str, str]]:
    """(chat template, special token strings) from chat_template.jinja and tokenizer_config.json."""
    path = folder / "tokenizer_config.json"
    raw = read_json(path) if path.exists() else {}
    template = raw.get("chat_template")
    if isinstance(template, list):  # several named templates: the one called "default"
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        try:
            template = jinja.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{jinja} cannot be read: {error}.", hint="Fetch the model again.") from error
    strings: dict[str, str] = {}
    for key in ("bos_token", "eos_token"):
        value = raw.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        strings[key] = text if isinstance(text, str) else ""
    return template if isinstance(template, str) else None, strings
