"""One recipe of each shape people have: what is read, and the exact file a patch makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from surespec.recipe import patch_recipe, read_recipe, read_text
from surespec.recipe.text import Source

DATA = Path(__file__).parents[1] / "data" / "recipes"
EAGLE3 = {
    "method": "eagle3",
    "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "num_speculative_tokens": 5,
    "draft_tensor_parallel_size": 1,
}
DRAFT = {"method": "draft_model", "model": "/models/draft.gguf", "num_speculative_tokens": 4}
QWEN = "Qwen/Qwen3-8B"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@dataclass(frozen=True)
class Case:
    kind: str
    engine: str
    model: str
    port: int = 8000
    image: str = ""
    version: str = ""
    utilization: float | None = None
    length: int | None = None
    service: str = ""
    method: str = ""  # of the speculation that is there already
    k: int | None = None
    faults: tuple[str, ...] = ()


OPENAI = "vllm/vllm-openai"
RUNTIME = "nvcr.io/nvidia/ai-dynamo/vllm-runtime"
CASES = {
    "thor_docker.sh": Case(
        "docker", "vllm", "nvidia/Llama-3.1-8B-Instruct-FP4", 8000, f"{OPENAI}:latest", "", 0.75, 8192, "vllm",
        faults=("doubled-entrypoint",),
    ),
    "orin_docker_array.sh": Case(
        "docker", "vllm", "Qwen/Qwen3-8B-AWQ", 8000, "ghcr.io/nvidia-ai-iot/vllm:latest-jetson-orin", "", 0.85, 8192,
        "vllm",
    ),
    "docker_double_quoted.sh": Case(
        "docker", "vllm", QWEN, 9000, f"{OPENAI}:v0.27.1", "0.27.1", 0.80, method="eagle3", k=3
    ),
    "bash_c.sh": Case("docker", "vllm", QWEN, 8000, "nvcr.io/nvidia/vllm:26.05-py3", "", None, 8192),
    "bare.sh": Case("cmdline", "vllm", QWEN, 8001, length=16000),
    "module_legacy.sh": Case(
        "cmdline", "vllm", LLAMA, utilization=0.9, method="ngram", k=5, faults=("legacy-flags",)
    ),
    "shorthand.sh": Case("cmdline", "vllm", QWEN, method="eagle3", k=2),
    "dotted.sh": Case("cmdline", "vllm", QWEN, method="eagle3", k=2),
    "split_variable.sh": Case("cmdline", "vllm", QWEN, utilization=0.85, length=8192),
    "sglang_docker.sh": Case(
        "docker", "sglang", QWEN, 30000, "nvcr.io/nvidia/sglang:26.01-py3", "", 0.7, method="eagle3", k=3
    ),
    "llama_server.sh": Case("cmdline", "llamacpp", "models/Qwen3-8B-Q4_K_M.gguf", 8080, length=8192),
    "llama_docker_old.sh": Case(
        "docker", "llamacpp", "/models/qwen3-8b.gguf", 8080, "ghcr.io/ggml-org/llama.cpp:server-cuda",
        method="draft_model", k=16,
    ),
    "compose_list.yaml": Case("compose", "vllm", QWEN, 8001, f"{OPENAI}:v0.27.1", "0.27.1", 0.85, 8192, "vllm"),
    "compose_folded.yml": Case(
        "compose", "vllm", QWEN, 8000, f"{OPENAI}:v0.20.0", "0.20.0", 0.85, 8192, "llm", faults=("doubled-entrypoint",)
    ),
    "compose_string.yaml": Case(
        "compose", "vllm", QWEN, 8000, f"{OPENAI}:v0.27.1", "0.27.1", service="vllm", method="ngram", k=4
    ),
    "compose_flow.yaml": Case("compose", "vllm", QWEN, 8000, f"{OPENAI}:latest", service="vllm"),
    "compose_literal.yaml": Case(
        "compose", "vllm", "/models/qwen3-8b", 8000, "ghcr.io/nvidia-ai-iot/vllm:latest-jetson-orin", "", 0.8, None,
        "vllm",
    ),
    "compose_crlf.yaml": Case("compose", "vllm", QWEN, 8000, f"{OPENAI}:v0.27.1", "0.27.1", 0.9, None, "vllm"),
    "vllm.service": Case("systemd", "vllm", QWEN, utilization=0.85, length=8192),
    "docker.service": Case(
        "systemd", "vllm", QWEN, 8000, f"{OPENAI}:v0.27.1", "0.27.1", 0.8, None, "vllm", method="eagle3", k=2
    ),
    "deployment.yaml": Case("kubernetes", "vllm", QWEN, 8000, f"{OPENAI}:v0.27.1", "0.27.1", 0.9, 8192, "qwen"),
    "deployment_shell.yaml": Case(
        "kubernetes", "vllm", LLAMA, 8000, f"{OPENAI}:v0.31.0", "0.31.0", 0.9, None, "llama", method="eagle3", k=2
    ),
    "dgd_v1beta1.yaml": Case(
        "dynamo", "dynamo", "meta-llama/Meta-Llama-3.1-8B-Instruct", 8000, f"{RUNTIME}:1.6.1", "1.6.1",
        service="VllmDecodeWorker",
    ),
    "dgd_v1alpha1.yaml": Case(
        "dynamo", "dynamo", "meta-llama/Meta-Llama-3.1-8B-Instruct", 8000, f"{RUNTIME}:0.8.0", "0.8.0", 0.8,
        service="VllmDecodeWorker", method="eagle3", k=2,
    ),
    "agg_spec_decoding.sh": Case(
        "dynamo_script", "dynamo", "meta-llama/Meta-Llama-3.1-8B-Instruct", utilization=0.8, method="eagle3", k=2
    ),
    "dynamo_args.sh": Case("dynamo_script", "dynamo", QWEN),
}  # fmt: skip


def wanted(case: Case) -> dict[str, Any]:
    return DRAFT if case.engine == "llamacpp" else EAGLE3


def again(path: Path, data: bytes) -> Any:
    return read_text(path, Source.decode(path.name, data))


@pytest.mark.parametrize("name", CASES)
def test_reads(name: str) -> None:
    case, read = CASES[name], read_recipe(DATA / name)
    assert (read.kind, read.engine, read.model, read.port) == (case.kind, case.engine, case.model, case.port)
    assert (read.image, read.engine_version, read.service) == (case.image, case.version, case.service)
    assert (read.gpu_memory_utilization, read.max_model_len) == (case.utilization, case.length)
    assert tuple(d.name for d in read.diagnoses) == case.faults
    config = read.speculative_config or {}
    assert (config.get("method", ""), config.get("num_speculative_tokens")) == (case.method, case.k)
    assert read.speculates is bool(case.method)


@pytest.mark.parametrize("name", CASES)
def test_patch_is_golden(name: str) -> None:
    patched = patch_recipe(read_recipe(DATA / name), wanted(CASES[name]))
    assert patched.data.decode() == (DATA / "patched" / name).read_bytes().decode()
    assert patched.changed


@pytest.mark.parametrize("name", CASES)
def test_patched_recipe_speculates_and_says_the_rest_as_before(name: str) -> None:
    case, before = CASES[name], read_recipe(DATA / name)
    after = again(DATA / name, (DATA / "patched" / name).read_bytes())
    assert {k: after.speculative_config[k] for k in ("method", "num_speculative_tokens")} == {
        k: wanted(case)[k] for k in ("method", "num_speculative_tokens")
    }
    assert not [d for d in after.diagnoses if d.name != "version"]
    for field in ("model", "image", "port", "host", "max_model_len", "env", "service", "kind"):
        assert getattr(after, field) == getattr(before, field)
    if case.utilization and not case.method:
        assert after.gpu_memory_utilization == pytest.approx(case.utilization - 0.05)
    else:
        assert after.gpu_memory_utilization == case.utilization


@pytest.mark.parametrize("name", CASES)
def test_patching_twice_equals_once(name: str) -> None:
    data = (DATA / "patched" / name).read_bytes()
    patched = patch_recipe(again(DATA / name, data), wanted(CASES[name]))
    assert not patched.changed
    assert patched.data == data


@pytest.mark.parametrize("name", CASES)
def test_removal_leaves_no_speculation_and_all_else(name: str) -> None:
    before = again(DATA / name, (DATA / "patched" / name).read_bytes())
    after = again(DATA / name, patch_recipe(before, None).data)
    assert not after.speculates
    assert after.flags == {k: v for k, v in before.flags.items() if k in after.flags}
    assert len(before.flags) - len(after.flags) <= 5


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if not c.method and not c.faults])
def test_adding_and_removing_changes_no_more_than_the_utilization(name: str) -> None:
    """Where nothing was mended and no memory is given back, the bytes are the first ones again."""
    read = read_recipe(DATA / name)
    added = patch_recipe(read, wanted(CASES[name]), lower_utilization=False)
    removed = patch_recipe(again(DATA / name, added.data), None)
    assert removed.data == (DATA / name).read_bytes()
