"""A safetensors file, memory-mapped, with every size checked before it is believed.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data. An own
reader, because the NumPy side of the ``safetensors`` package has no BF16, which is what most published models use.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surespec.errors import ModelError
from surespec.json_text import loads_json
from surespec.local.types import FloatArray

MAX_DIMS = 16
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
DTYPES: dict[str, str] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}
FLOATS = ("F32", "F16", "BF16", "F64")
HINT = "The file is cut off or damaged; fetch it again."


class SafetensorsFile:
    """Read access to one file. ``shapes`` maps every tensor name to its shape. Raises ModelError on any lie."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
        except OSError as error:
            raise ModelError(f"{path} cannot be opened: {error.strerror or error}.", hint=HINT) from error
        if size < 8:
            raise ModelError(f"{path} is {size} bytes long; a safetensors file has at least 8.", hint=HINT)
        (length,) = struct.unpack("<Q", self._bytes[:8].tobytes())
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise ModelError(f"{path}: its header claims {length} bytes, but the file has {size}.", hint=HINT)
        try:
            header = loads_json(self._bytes[8 : 8 + length].tobytes())
        except ValueError as error:
            raise ModelError(f"{path}: its header is not JSON ({error}).", hint=HINT) from error
        if not isinstance(header, dict):
            raise ModelError(f"{path}: its header is not a JSON object.", hint=HINT)
        header.pop("__metadata__", None)
        self._data = self._bytes[8 + length :]
        self._entries = {name: self._entry(name, value) for name, value in header.items()}
        self.shapes: dict[str, tuple[int, ...]] = {name: entry[1] for name, entry in self._entries.items()}

    def _entry(self, name: str, value: Any) -> tuple[str, tuple[int, ...], int, int]:
        """(dtype, shape, begin, end) of one header entry, checked against the file."""
        try:
            dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
            if not isinstance(dtype, str):
                raise TypeError("its type is no text")
            whole = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{self.path}: tensor '{name}' has no dtype, shape or offsets.", hint=HINT) from error
        if not whole or begin > end or len(shape) > MAX_DIMS:
            raise ModelError(f"{self.path}: tensor '{name}' has an impossible shape or offset.", hint=HINT)
        if end > len(self._data):
            raise ModelError(
                f"{self.path}: tensor '{name}' ends at byte {end}, but the file holds {len(self._data)} bytes of data.",
                hint=HINT,
            )
        item = np.dtype(DTYPES[dtype]).itemsize if dtype in DTYPES else None
        if item is not None and math.prod(shape) * item != end - begin:
            raise ModelError(
                f"{self.path}: tensor '{name}' of shape {shape} and type {dtype} "
                f"needs {math.prod(shape) * item} bytes, but {end - begin} are stored.",
                hint=HINT,
            )
        return dtype, shape, begin, end

    def read(self, name: str) -> NDArray[Any]:
        """The tensor as stored (BF16 as its 16 bit words), a view into the memory map where alignment allows."""
        dtype, shape, begin, end = self._entries[name]
        if dtype not in DTYPES:
            raise ModelError(
                f"{self.path}: tensor '{name}' has type {dtype}, which is not supported ({', '.join(FLOATS)} are).",
                hint="Use a plain fp32, fp16 or bf16 form of the model, or a GGUF.",
            )
        raw = self._data[begin:end]
        if raw.ctypes.data % np.dtype(DTYPES[dtype]).itemsize:
            raw = raw.copy()
        return raw.view(DTYPES[dtype]).reshape(shape)

    def read_float32(self, name: str) -> FloatArray:
        """The tensor as fp32; F32 is a view, F16, BF16 and F64 are converted. ModelError for other types."""
        dtype = self._entries[name][0]
        if dtype not in FLOATS:
            raise ModelError(
                f"{self.path}: tensor '{name}' has type {dtype}; a float type is needed ({', '.join(FLOATS)}).",
                hint="Use a plain fp32, fp16 or bf16 form of the model, or a GGUF.",
            )
        stored = self.read(name)
        if dtype == "BF16":
            return bf16_to_float32(stored)
        return stored.astype(np.float32, copy=False)


def bf16_to_float32(words: NDArray[np.uint16]) -> FloatArray:
    """bfloat16 words (any shape) as fp32: a bfloat16 is the upper half of an fp32."""
    wide: NDArray[np.uint32] = words.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)
