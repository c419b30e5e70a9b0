"""Rough forecasts of how long an engine takes, said before anything is launched. Nothing is decided by them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from surespec.errors import ModelError
from surespec.json_text import loads_json

MAX_HEADER_BYTES = 100_000_000
"""The most that the safetensors format allows for its header."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds until a server answers, and milliseconds of one decoding step of one sequence."""

    start_s: float
    step_ms: float


def parameters_of(model: str) -> float:
    """About how many weights a model has, by its files. Raises ModelError for no such model."""
    from surespec.fetch import known_models

    asset = known_models().get(model)
    path = Path(model).expanduser()
    if asset is not None and not path.exists():
        return 8 * asset.size_bytes / _bits_per_weight(asset.file)
    if path.is_file():
        return 8 * path.stat().st_size / _bits_per_weight(path.name)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"There is no model {model!r}: it is not a file or a folder with *.safetensors, nor a known name.",
            hint=f"Known: {', '.join(known_models())}.",
        )
    return sum(file.stat().st_size for file in files) / _bytes_per_weight(files[0])


def step_ms(parameters: float, precision: str) -> float:
    """Forecast of one decoding step: weights over 30 GB/s in fp32 (a common desktop), less in 8 and 4 bit."""
    fp32 = 4 * parameters / 30e9 * 1e3
    return 2.0 + fp32 * {"fp32": 1.0, "int8": 0.6, "int4": 0.4}.get(precision, 1.0)


def _bits_per_weight(name: str) -> float:
    """By the quantisation in a GGUF's file name, with its scales and the wider tables; 5.5 where it names none."""
    match = re.search(r"(?:Q|IQ)(\d)|[B]?F(16|32)", name.upper())
    if match is None:
        return 5.5
    return int(match[1]) + 1.5 if match[1] else float(match[2])


def _bytes_per_weight(file: Path) -> float:
    """4 when a safetensors file holds F32, else 2; damage is found when the model is loaded."""
    try:
        with file.open("rb") as source:
            size = int.from_bytes(source.read(8), "little")
            header = loads_json(source.read(size) if size <= MAX_HEADER_BYTES else b"")
        return 4.0 if any(isinstance(t, dict) and t.get("dtype") == "F32" for t in header.values()) else 2.0
    except (OSError, ValueError, AttributeError):
        return 2.0
