"""The header of a GGUF file, read with every count and length checked against the file before it is believed.

Format (little-endian): magic ``GGUF``, u32 version, u64 tensor count, u64 metadata count; metadata entries (string key,
u32 type, value); tensor entries (string name, u32 dims, u64 sizes innermost first, u32 type, u64 offset); padding to
``general.alignment``; data. The ``gguf`` package's own reader is not used for this part: it trusts the counts, and a
damaged file can keep it busy until memory runs out. Its block sizes and dequantisers are.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from surespec.errors import ModelError
from surespec.local.types import FloatArray

HINT = "The file is cut off or damaged; fetch it again."
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: ``shape`` as NumPy sees it (outermost first), and where its bytes lie."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    begin: int
    num_bytes: int


class GgufFile:
    """Metadata and tensors of one GGUF file. Raises ModelError naming the file and the field or tensor at fault."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.size = path.stat().st_size
            self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, "r") if self.size else np.empty(0, np.uint8)
        except OSError as error:
            raise ModelError(f"{path} cannot be opened: {error.strerror or error}.") from error
        self._at = 0
        if self._bytes[:4].tobytes() != b"GGUF":
            raise ModelError(
                f"{path} is not a GGUF file (it does not begin with 'GGUF').",
                hint="Give a GGUF file or a folder with config.json and *.safetensors.",
            )
        self._at = 4
        version = self._scalar("<I", "version")
        if version not in (2, 3):
            raise ModelError(f"{path}: GGUF version {version} is not supported (2 and 3, little-endian, are).")
        num_tensors = self._count("tensor count", 24)
        num_fields = self._count("metadata count", 12)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string("a metadata key")
            self.metadata[key] = self._value(self._scalar("<I", key), key)
        raw = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{path}: general.alignment is {alignment!r}; it must be a power of two.", hint=HINT)
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in raw:
            self.tensors[name] = self._tensor(name, shape, kind, start + offset)

    def _take(self, count: int, what: str) -> bytes:
        end = self._at + count
        if end > self.size:
            raise ModelError(
                f"{self.path} ends at byte {self.size} inside its header, while reading {what}.", hint=HINT
            )
        chunk = self._bytes[self._at : end].tobytes()
        self._at = end
        return chunk

    def _scalar(self, code: str, what: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code), what))[0]

    def _count(self, what: str, smallest: int) -> int:
        """A u64 count of things of at least ``smallest`` bytes each, which must fit into the rest of the file."""
        count = int(self._scalar("<Q", what))
        if count * smallest > self.size - self._at:
            raise ModelError(f"{self.path}: {what} is {count}, more than the file can hold.", hint=HINT)
        return count

    def _string(self, what: str) -> str:
        length = self._count(f"the length of {what}", 1)
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {what} is not valid UTF-8.", hint=HINT) from error

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._string(f"'{key}'")
        if kind == ARRAY:
            inner = self._scalar("<I", f"'{key}'")
            if inner == STRING:
                return [self._string(f"'{key}'") for _ in range(self._count(f"the length of '{key}'", 8))]
            if inner in SCALARS:
                item = struct.calcsize(SCALARS[inner])
                count = self._count(f"the length of '{key}'", item)
                chunk = self._take(count * item, f"'{key}'")
                return np.frombuffer(chunk, np.dtype(SCALARS[inner].replace("<?", "?"))).tolist()
        elif kind in SCALARS:
            return self._scalar(SCALARS[kind], f"'{key}'")
        raise ModelError(f"{self.path}: '{key}' has the unknown value type {kind}.", hint=HINT)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor name")
        dims = self._scalar("<I", f"tensor '{name}'")
        if not 1 <= dims <= MAX_DIMS:
            raise ModelError(f"{self.path}: tensor '{name}' has {dims} dimensions.", hint=HINT)
        sizes = struct.unpack(f"<{dims}Q", self._take(8 * dims, f"tensor '{name}'"))
        kind = self._scalar("<I", f"tensor '{name}'")
        offset = int(self._scalar("<Q", f"tensor '{name}'"))
        return name, tuple(reversed(sizes)), kind, offset

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        try:
            quant = gguf.GGMLQuantizationType(kind)
        except ValueError as error:
            raise ModelError(f"{self.path}: tensor '{name}' has the unknown type {kind}.", hint=HINT) from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
        if 0 in shape:
            raise ModelError(f"{self.path}: tensor '{name}' of shape {shape} is empty.", hint=HINT)
        if shape[-1] % block:
            raise ModelError(
                f"{self.path}: rows of tensor '{name}' have {shape[-1]} values, "
                f"which is not a whole number of {quant.name} blocks of {block}."
            )
        num_bytes = math.prod(shape) // block * block_bytes
        if begin + num_bytes > self.size:
            raise ModelError(
                f"{self.path} is {self.size} bytes long, but tensor '{name}' ends at byte {begin + num_bytes}.",
                hint=HINT,
            )
        return GgufTensor(name, shape, quant.name, begin, num_bytes)

    def read(self, name: str) -> FloatArray:
        """The tensor as fp32, dequantised. ModelError when its type is not one of ``TYPES``."""
        tensor = self.tensors[name]
        if tensor.type_name not in TYPES:
            raise ModelError(
                f"{self.path}: tensor '{name}' has type {tensor.type_name}, which is not supported.",
                hint=f"Use a GGUF whose tensors are {', '.join(TYPES)}.",
            )
        quant = gguf.GGMLQuantizationType[tensor.type_name]
        raw = np.asarray(self._bytes[tensor.begin : tensor.begin + tensor.num_bytes])
        values = gguf.dequantize(raw.reshape(-1, tensor.num_bytes // math.prod(tensor.shape[:-1] or (1,))), quant)
        result: FloatArray = np.ascontiguousarray(values, np.float32).reshape(tensor.shape)
        return result
