"""Block quantisation for ONNX Runtime's ``MatMulNBits``, in NumPy.

Symmetric: each row is cut into blocks of ``BLOCK`` inputs, each with one fp32 scale. The operator's default zero point
is the middle of the code range (8 for 4 bits, 128 for 8), so a code c stands for (c - middle) * scale. The scale is set
by the value of largest magnitude, signed so that it falls on the range's wider end (code 0), which uses all the codes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from surespec.local.types import FloatArray

BLOCK = 32


def quantize_blocks(weight: FloatArray, bits: int) -> tuple[NDArray[np.uint8], FloatArray]:
    """(codes (out, blocks, BLOCK * bits / 8) uint8, scales (out * blocks,)) of ``weight`` (out, in), bits 4 or 8.

    A last block that is not full is filled with zeros. Two 4-bit codes share a byte, the first one low.
    """
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK)
    if columns % BLOCK:
        weight = np.pad(weight, ((0, 0), (0, blocks * BLOCK - columns)))
    grouped = weight.reshape(rows, blocks, BLOCK)
    middle = 1 << (bits - 1)
    high, low = grouped.max(axis=2), grouped.min(axis=2)
    scales = np.where(high > -low, high, low) / np.float32(-middle)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales != 0)
    scaled = grouped * inverse[:, :, None]
    np.rint(scaled, out=scaled)
    scaled += middle
    codes = np.clip(scaled, 0, 2 * middle - 1, out=scaled).astype(np.uint8)
    if bits == 4:
        codes = codes[:, :, 0::2] | (codes[:, :, 1::2] << np.uint8(4))
    return np.ascontiguousarray(codes), scales.astype(np.float32).reshape(-1)


def dequantize_blocks(codes: NDArray[np.uint8], scales: FloatArray, bits: int, columns: int) -> FloatArray:
    """The (out, columns) matrix that ``quantize_blocks`` output stands for."""
    rows, blocks, _ = codes.shape
    if bits == 4:
        wide = np.empty((rows, blocks, BLOCK), np.uint8)
        wide[:, :, 0::2], wide[:, :, 1::2] = codes & 15, codes >> 4
        codes = wide
    values = (codes.astype(np.float32) - (1 << (bits - 1))) * scales.reshape(rows, blocks, 1)
    flat: FloatArray = values.reshape(rows, -1)[:, :columns]
    return flat
