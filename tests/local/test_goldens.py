"""The engine's logits against Hugging Face transformers' on the same weights (files made by tools/make_goldens.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import toy
from surespec.local.model import TargetModel
from surespec.local.types import SeqChunk
from surespec.local.weights import load_model_files

DATA = Path(__file__).parent.parent / "data"
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TOYS = {
    "llama": (toy.make_llama, {}),
    "llama_tied": (toy.make_llama, {"tie": True, "seed": 1}),
    "llama3_rope": (toy.make_llama, {"rope_scaling": LLAMA3_SCALING, "seed": 2}),
    "qwen2": (toy.make_qwen2, {"seed": 3}),
    "qwen3": (toy.make_qwen3, {"seed": 4}),
}
# Largest differences seen: 5.5e-5 on the toys (logits to 30), 7.5e-5 on the real model (logits to 38).
TOY_TOLERANCE, REAL_TOLERANCE = 1e-4, 2e-4


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("pieces", [1, 9])
def test_toy_logits_agree_with_transformers(name: str, pieces: int, tmp_path: Path) -> None:
    golden = np.load(DATA / "golden_toy.npz")
    make, shape = TOYS[name]
    files = load_model_files(make(tmp_path / name, **shape))
    total = sum(float(np.abs(files.tensors[n].astype(np.float64)).sum()) for n in files.tensors)
    assert total == pytest.approx(float(golden[f"{name}.weights_sum"]), rel=1e-9), (
        "the toy's weights are not the golden's"
    )
    model = TargetModel(files, threads=1)
    cache = model.new_cache(1, 512)
    cache.alloc()
    start, rows = 0, []
    for part in np.array_split(golden[f"{name}.ids"], pieces):
        rows.append(model.forward([SeqChunk(0, start, part, 0)], cache).logits)
        start += len(part)
    difference = np.abs(np.concatenate(rows) - golden[f"{name}.logits"]).max()
    assert difference < TOY_TOLERANCE


@pytest.mark.model
def test_real_model_agrees_with_transformers() -> None:
    from surespec.fetch import resolve_model

    golden = np.load(DATA / "golden_smollm2.npz")
    model = TargetModel(load_model_files(resolve_model("smollm2-135m")))
    for index in range(3):
        ids = golden[f"{index}.ids"]
        cache = model.new_cache(1, 512)
        cache.alloc()
        logits = model.forward([SeqChunk(0, 0, ids, 0)], cache).logits
        kept = golden[f"{index}.logits"]
        assert np.abs(logits[-len(kept) :, ::24] - kept).max() < REAL_TOLERANCE
        assert (logits.argmax(-1) == golden[f"{index}.argmax"]).all()
        token, continued = int(logits[-1].argmax()), []
        while len(continued) < len(golden[f"{index}.continued"]):
            continued.append(token)
            chunk = SeqChunk(0, len(ids) + len(continued) - 1, np.array([token]), 0)
            token = int(model.forward([chunk], cache).logits[0].argmax())
        assert continued == golden[f"{index}.continued"].tolist()
