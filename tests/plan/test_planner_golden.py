"""Whole plans, device x model x engine, compared with files reviewed by hand.

After an intended change: ``SURESPEC_UPDATE_GOLDENS=1 pytest tests/plan/test_planner_golden.py``, then read the diff.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from surespec.models import resolve
from surespec.plan import plan, runtime_for
from surespec.plan_nouns import PlanOptions
from surespec.probe import find_device

DATA = Path(__file__).parents[1] / "data" / "plan"
GOLDEN = DATA / "golden"

# name -> (board folder or table id, l4t, model, engine, version, options)
Case = tuple[str, str, str, str, str, dict[str, Any]]
CASES: dict[str, Case] = {
    "thor-llama8b": ("thor-t5000", "", "Llama-3.1-8B", "", "", {}),
    "thor-llama8b-fp4": ("thor-t5000", "", "nvidia/Llama-3.1-8B-Instruct-FP4", "", "0.31.0", {"concurrency": (1,)}),
    "thor-llama70b-fp4": ("thor-t5000", "", "nvidia/Llama-3.3-70B-Instruct-FP4", "", "0.27.1", {}),
    "thor-llama70b-bf16": ("thor-t5000", "", "Llama-3.3-70B", "", "", {}),
    "thor-qwen8b-w4a16": ("thor-t5000", "", "RedHatAI/Qwen3-8B-quantized.w4a16", "", "0.33.0", {}),
    "thor-gptoss": ("thor-t5000", "", "gpt-oss-20b", "", "", {}),
    "thor-qwen30b": ("thor-t5000", "", "Qwen3-30B-A3B", "", "0.24.0", {}),
    "thor-load-only": ("thor-t5000", "", "Llama-3.1-8B", "", "0.31.0", {"concurrency": (8, 16)}),
    "thor-ceiling": ("thor-t5000", "", "Llama-3.1-8B", "", "", {"gpu_memory_utilization": 0.90}),
    "thor-sglang": ("thor-t5000", "", "Qwen3-8B", "sglang", "", {}),
    "thor-llamacpp": ("thor-t5000", "", "Llama-3.1-8B", "llamacpp", "", {}),
    "thor-trtllm": ("thor-t5000", "", "Llama-3.1-8B", "trtllm", "", {}),
    "thor-board": ("boards/thor-t5000", "", "Llama-3.1-8B", "", "", {}),
    "thor-serving-board": ("boards/thor-serving", "", "Llama-3.1-8B", "", "", {}),
    "thor-t4000-board": ("boards/thor-t4000", "", "Qwen3-8B", "", "", {}),
    "thor-container": ("boards/thor-container", "", "Qwen3-8B", "", "0.31.0", {}),
    "agx64-llama8b-draft": ("orin-agx-64gb", "39.2", "Llama-3.1-8B", "", "0.20.0", {}),
    "agx64-board-r36": ("boards/orin-agx-64gb", "", "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "", "", {}),
    "agx64-gptoss": ("orin-agx-64gb", "", "gpt-oss-20b", "", "0.26.0", {}),
    "agx64-llama70b": ("orin-agx-64gb", "", "Llama-3.3-70B", "", "", {}),
    "agx32-board": ("boards/orin-agx-32gb", "", "Qwen3-8B", "", "", {}),
    "agx32-llama8b": ("orin-agx-32gb", "", "Llama-3.1-8B", "", "", {}),
    "nx16-board": ("boards/orin-nx-16gb", "", "Qwen3-8B", "", "", {}),
    "nx8-board": ("boards/orin-nx-8gb", "", "Llama-3.1-8B", "", "", {}),
    "nano8-board": ("boards/orin-nano-8gb", "", "Llama-3.1-8B", "", "", {}),
    "nano4-board": ("boards/orin-nano-4gb", "", "gpt-oss-20b", "", "", {}),
    "spark-board": ("boards/dgx-spark", "", "gpt-oss-20b", "", "", {}),
    "rtx5090-board": ("boards/rtx-5090", "", "Qwen3-8B", "", "0.33.0", {}),
    "rtx5090-sglang": ("rtx-5090", "", "Qwen3-8B", "sglang", "0.5.23", {}),
    "h100-pair-busy": ("boards/h100-pair", "", "Llama-3.1-8B", "", "", {}),
    "h100-old-vllm": ("h100", "", "Llama-3.1-8B", "", "0.12.0", {}),
    "h100-vllm-08": ("h100", "", "Llama-3.1-8B", "", "0.8.5.post1", {}),
    "h100-trtllm": ("h100", "", "Llama-3.1-8B", "trtllm", "", {}),
    "h100-dynamo": ("h100", "", "Llama-3.1-8B", "dynamo", "", {}),
    "h100-dynamo-k8s": ("h100", "", "Llama-3.1-8B", "dynamo", "", {"kubernetes": True, "concurrency": (1,)}),
    "h100-dynamo-trtllm": ("h100", "", "Llama-3.1-8B", "dynamo-trtllm", "", {"concurrency": (1,)}),
    "h200-llama70b-fp8": ("h200", "", "nvidia/Llama-3.3-70B-Instruct-FP8", "", "0.31.0", {}),
    "l4-llama8b": ("l4", "", "Llama-3.1-8B", "", "0.31.0", {"max_model_len": 32768}),
    "a100-qwen30b": ("a100-80gb", "", "Qwen3-30B-A3B", "", "0.31.0", {}),
    "cpu-smollm": ("cpu", "", "smollm2-135m", "", "", {}),
    "cpu-box-vllm": ("boards/cpu-box", "", "smollm2-135m", "vllm", "0.32.0", {"max_model_len": 2048}),
}


def document(case: Case) -> dict[str, Any]:
    place, l4t, model, engine, version, options = case
    captured = place.startswith("boards/")
    device = find_device("" if captured else place, l4t, DATA / place if captured else None)
    result = plan(device, runtime_for(device, engine, version), resolve(model, offline=True), PlanOptions(**options))
    full = result.document()
    arm_keys = (
        "name", "method", "num_speculative_tokens", "speculative_config", "gpu_memory_utilization", "fits",
        "margin_gib", "rules", "command", "files", "changes", "notes", "break_even_length",
    )  # fmt: skip
    return {
        "device": {k: full["device"][k] for k in ("sku", "memory_gb", "l4t", "jetpack")},
        "model": {k: full["model"][k] for k in ("id", "weight_bytes", "kv_bytes_per_token")},
        "exit_code": result.exit_code,
        "baseline_command": full["baseline_command"],
        "arms": [{k: arm[k] for k in arm_keys} for arm in full["arms"]],
        "refused": full["refused"],
        "notes": full["notes"],
    }


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    got = json.loads(json.dumps(document(CASES[name])))
    file = GOLDEN / f"{name}.json"
    if os.environ.get("SURESPEC_UPDATE_GOLDENS"):
        GOLDEN.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(got, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert got == json.loads(file.read_text(encoding="utf-8"))


def test_no_golden_without_a_case() -> None:
    assert {file.stem for file in GOLDEN.glob("*.json")} == set(CASES)
