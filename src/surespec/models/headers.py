"""Folders and GGUF files: configuration and headers only. A length that a file claims is checked before it is used."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any, BinaryIO

from surespec.errors import ModelError
from surespec.json_text import loads_json
from surespec.memory import parameter_count
from surespec.models.shape import from_config
from surespec.plan_nouns import KVGroup, Model

MAX_JSON_BYTES = 64 * 2**20
MAX_STRING_BYTES = 16 * 2**20
MAX_ENTRIES = 1 << 20
MAX_ARRAY = 1 << 22
# llama.cpp's general.file_type -> a name; what is not listed is named by its number.
_GGUF_TYPES = {
    0: "fp32",
    1: "fp16",
    2: "q4_0",
    3: "q4_1",
    7: "q8_0",
    8: "q5_0",
    9: "q5_1",
    10: "q2_k",
    12: "q3_k_m",
    14: "q4_k_s",
    15: "q4_k_m",
    16: "q5_k_s",
    17: "q5_k_m",
    18: "q6_k",
    32: "bf16",
}
_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of sane size. Raises ModelError naming the file."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {MAX_JSON_BYTES // 2**20} MiB, not a configuration.")
        value = loads_json(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object was expected.")
    return value


def safetensors_bytes(path: Path) -> int:
    """Bytes of the tensors of one safetensors file, from its header. Raises ModelError when the header lies."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little") if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_JSON_BYTES, size - 8):
            raise ModelError(f"{path}: the header claims {length} bytes, which the file of {size} bytes cannot hold.")
        try:
            header = loads_json(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}: the safetensors header is not valid JSON.") from error
    body = size - 8 - length
    total = 0
    entries = header.items() if isinstance(header, dict) else ()
    for name, entry in entries:
        if name == "__metadata__":
            continue
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(o) is int for o in offsets)):
            raise ModelError(f"{path}: tensor {name!r} has no data offsets.")
        start, end = offsets
        if not 0 <= start <= end <= body:
            raise ModelError(f"{path}: tensor {name!r} lies outside the file; the download is incomplete.")
        total += end - start
    return total


def folder_weight_bytes(folder: Path) -> int:
    """Bytes of a folder's weights: the index's total_size, else the headers of its safetensors files; 0 for none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        total = read_json(index).get("metadata", {})
        size = total.get("total_size") if isinstance(total, dict) else None
        if isinstance(size, (int, float)) and 0 < size < 2**62:
            return int(size)
    return sum(safetensors_bytes(file) for file in sorted(folder.glob("*.safetensors")))


def from_folder(folder: Path) -> Model:
    """The facts of a folder with config.json. Raises ModelError."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelError(f"{folder}: holds no config.json.", hint="Give the folder of a Hugging Face checkpoint.")
    config = read_json(config_file)
    quant_file = folder / "hf_quant_config.json"  # ModelOpt checkpoints say their precision here
    if quant_file.is_file() and "quantization_config" not in config:
        nested = read_json(quant_file).get("quantization")
        config = {**config, "quantization_config": nested if isinstance(nested, dict) else {}}
    model = from_config(
        config,
        str(folder),
        checkpoint_bytes=folder_weight_bytes(folder),
        source=f"{folder.name}/config.json",
        path=str(folder),
    )
    bases = tuple(
        str(v) for v in (config.get("_name_or_path"),) if isinstance(v, str) and "/" in v and v != str(folder)
    )
    return model.model_copy(update={"target_of": bases, "tokenizer_hash": tokenizer_hash(folder / "tokenizer.json")})


def tokenizer_hash(path: Path) -> str:
    """A short hash of a tokenizer file, to compare a draft's with its target's; empty when there is none."""
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class _Reader:
    """Bounded reads from a file: nothing is read beyond its end, and no length is believed that exceeds it."""

    def __init__(self, file: BinaryIO, size: int, name: str) -> None:
        self.file, self.size, self.name = file, size, name

    def take(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.size - self.file.tell() else b""
        if len(data) != count:
            raise ModelError(f"{self.name}: ends inside its header; the file is cut or not a GGUF.")
        return data

    def skip(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise ModelError(f"{self.name}: ends inside its header; the file is cut or not a GGUF.")
        self.file.seek(count, 1)

    def number(self, kind: str) -> Any:
        return struct.unpack(kind, self.take(struct.calcsize(kind)))[0]

    def string(self) -> str:
        length = self.number("<Q")
        if length > MAX_STRING_BYTES:
            raise ModelError(f"{self.name}: a text in the header claims {length} bytes.")
        return self.take(length).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """One metadata value; an array is reported as its length only."""
        if kind == 8:
            return self.string()
        if kind == 9:
            element, count = self.number("<I"), self.number("<Q")
            if count > MAX_ARRAY:
                raise ModelError(f"{self.name}: an array in the header claims {count} elements.")
            if element in _GGUF_SIZES:
                self.skip(count * _GGUF_SIZES[element])
            elif element == 8:
                for _ in range(count):
                    self.skip(self.number("<Q"))
            else:
                raise ModelError(f"{self.name}: an array of unknown type {element} in the header.")
            return count
        if kind not in _GGUF_FORMATS:
            raise ModelError(f"{self.name}: unknown value type {kind} in the header.")
        return self.number(_GGUF_FORMATS[kind])


def gguf_metadata(path: Path) -> tuple[dict[str, Any], frozenset[str], int]:
    """The metadata of a GGUF file (arrays as their lengths), its tensors' names, and the bytes behind the header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        reader = _Reader(file, size, str(path))
        if reader.take(4) != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file.")
        version, tensors, entries = reader.number("<I"), reader.number("<Q"), reader.number("<Q")
        if version not in (2, 3) or tensors > MAX_ENTRIES or entries > MAX_ENTRIES:
            raise ModelError(
                f"{path}: GGUF version {version} with {tensors} tensors and {entries} entries is not readable."
            )
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = reader.string()
            metadata[key] = reader.value(reader.number("<I"))
        names = set()
        for _ in range(tensors):
            names.add(reader.string())
            dimensions = reader.number("<I")
            if dimensions > 8:
                raise ModelError(f"{path}: a tensor in the header claims {dimensions} dimensions.")
            reader.skip(8 * dimensions + 4 + 8)
        return metadata, frozenset(names), size - file.tell()


def from_gguf(path: Path) -> Model:
    """The facts of a GGUF file from its header. Raises ModelError."""
    metadata, tensors, body = gguf_metadata(path)
    arch = str(metadata.get("general.architecture", ""))

    def number(key: str, default: int = 0) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 24 else default

    hidden, layers, heads = number("embedding_length"), number("block_count"), number("attention.head_count")
    if not (arch and hidden and layers and heads):
        raise ModelError(f"{path}: the GGUF header lacks the model's shape (architecture {arch or 'missing'}).")
    head_dim = number("attention.key_length") or hidden // heads
    vocab = metadata.get("tokenizer.ggml.tokens") or number("vocab_size")
    model = Model(
        id=path.name,
        architecture=arch,
        model_type=arch,
        hidden_size=hidden,
        intermediate_size=number("expert_feed_forward_length") or number("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        vocab_size=int(vocab or 0),
        max_position_embeddings=number("context_length"),
        tie_word_embeddings=bool(tensors) and "output.weight" not in tensors,
        num_experts=number("expert_count"),
        experts_per_token=number("expert_used_count"),
        quantization=_GGUF_TYPES.get(int(metadata.get("general.file_type", -1)), "gguf"),
        weight_bytes=body,
        weight_source="size of the file",
        kv_groups=(
            KVGroup(
                kind="full",
                layers=layers,
                kv_heads=number("attention.head_count_kv") or heads,
                head_dim_k=head_dim,
                head_dim_v=number("attention.value_length") or head_dim,
            ),
        ),
        mtp_layers=number("nextn_predict_layers"),
        target_of=tuple(str(metadata[k]) for k in ("general.name",) if metadata.get(k)),
        license=str(metadata.get("general.license", "")),
        path=str(path),
        format="gguf",
        source=f"{path.name} header",
    )
    return model.model_copy(update={"parameters": parameter_count(model)})
