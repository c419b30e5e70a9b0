"""Write the golden files that the tests compare the embedded engine with: logits of Hugging Face transformers.

Run once, in an environment with torch and transformers (which surespec itself does not need):

    python tools/make_goldens.py --out tests/data                 # the toy models of tests/toy.py
    python tools/make_goldens.py --out tests/data --real FOLDER   # and the default model, as `surespec fetch
                                                                  # smollm2-135m --format hf` writes it

Everything is computed in fp32 with eager attention. Weights of the toys come from a seed; ``weights_sum`` in the file
lets a test tell "NumPy drew other numbers" from "the engine is wrong".
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import toy

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TOYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (toy.make_llama, {}),
    "llama_tied": (toy.make_llama, {"tie": True, "seed": 1}),
    "llama3_rope": (toy.make_llama, {"rope_scaling": LLAMA3_SCALING, "seed": 2}),
    "qwen2": (toy.make_qwen2, {"seed": 3}),
    "qwen3": (toy.make_qwen3, {"seed": 4}),
}
TOY_TOKENS = 90  # beyond the toys' original context of 64, so that Llama-3's scaling shows
PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that checks whether a number is prime.",
    "Übersetze ins Englische: Der Himmel über der Stadt ist heute blau. 😀",
)
COLUMN_STEP, LAST_ROWS, CONTINUED = 24, 8, 32


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    """Logits (n, vocab) of one sequence."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def load(folder: Path) -> Any:
    """The model in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def toys() -> dict[str, np.ndarray]:
    """ids and logits of every toy."""
    arrays: dict[str, np.ndarray] = {}
    for name, (make, shape) in TOYS.items():
        with tempfile.TemporaryDirectory() as scratch:
            model = load(make(Path(scratch) / name, **shape))
            ids = np.random.default_rng(5).integers(0, 320, TOY_TOKENS)
            arrays[f"{name}.ids"] = ids
            arrays[f"{name}.logits"] = logits_of(model, ids.tolist())
            total = sum(float(p.double().abs().sum()) for _, p in sorted(model.named_parameters()))
            arrays[f"{name}.weights_sum"] = np.array(total)
    return arrays


def real(folder: Path) -> dict[str, np.ndarray]:
    """Of each prompt: ids, every 24th column of the last rows of logits, all rows' argmax, the greedy continuation."""
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    arrays: dict[str, np.ndarray] = {}
    for index, prompt in enumerate(PROMPTS):
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        logits = logits_of(model, ids)
        arrays[f"{index}.prompt"] = np.array(prompt)
        arrays[f"{index}.ids"] = np.array(ids)
        arrays[f"{index}.logits"] = logits[-LAST_ROWS:, ::COLUMN_STEP].copy()
        arrays[f"{index}.argmax"] = logits.argmax(-1)
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=CONTINUED, do_sample=False)
        arrays[f"{index}.continued"] = out[0, len(ids) :].numpy()
    return arrays


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for golden_toy.npz and golden_smollm2.npz")
    parser.add_argument("--real", type=Path, help="folder of the default model in Hugging Face's layout")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out / "golden_toy.npz", **toys())
    if options.real:
        np.savez_compressed(options.out / "golden_smollm2.npz", **real(options.real))


if __name__ == "__main__":
    main()
