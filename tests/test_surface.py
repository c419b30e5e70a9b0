"""The outer surface: what importing costs, what names are exported, and what the command line answers to mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("numpy", "onnxruntime", "onnx", "scipy", "matplotlib", "aiohttp", "pydantic")


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "surespec", *arguments], capture_output=True, text=True, cwd=cwd, timeout=60, check=False
    )


@pytest.mark.parametrize("module", ["surespec", "surespec.cli"])
def test_importing_stays_light(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_exported_names() -> None:
    import surespec
    from surespec import errors

    assert surespec.__all__ == ["__version__"]
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.SurespecError)
        assert getattr(errors, name).exit_code in (1, 2)


def test_help_and_version() -> None:
    assert "tune" in run("--help").stdout
    assert run("--version").stdout.startswith("surespec 0.")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["fetch", "gpt-5"], 2, "cannot fetch 'gpt-5'"),
        (["fetch", "smollm2-135m", "--format", "exl2"], 2, "Choose gguf or hf"),
        (["bench", "--concurrency", "0"], 2, "--concurrency 0"),
        (["bench", "--concurrency", "one"], 2, "Write --concurrency 1,8"),
        (["bench", "--endpoint", "http://127.0.0.1:9", "--num-prompts", "1"], 1, "http://127.0.0.1:9"),
        (["tune", "--budget", "soon"], 2, "--budget soon"),
        (["tune", "--policy", "greedy", "--dry-run"], 2, "Known: any-gain"),
        (["tune", "--engine", "exllama"], 2, "--engine exllama"),
        (["judge", "no-such-file.json", "neither.json"], 2, "no-such-file.json"),
        (["serve", "--model", "no-such-model"], 1, "no model 'no-such-model'"),
        (["report", "no-such-folder"], 1, "no-such-folder"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_mistakes_get_a_sentence_and_their_exit_code(
    arguments: list[str], code: int, says: str, tmp_path: Path
) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert says in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert done.returncode == code
    assert list(tmp_path.iterdir()) == []


def test_a_verdict_is_the_exit_code(tmp_path: Path) -> None:
    """Twice the same file: no gain for certain, so 10; its JSON says the same."""
    run_of = {"concurrency": 1, "ttft_ms_p50": 20.0, "ttft_ms_p99": 30.0, "itl_ms_p50": 9.0, "itl_ms_p99": 12.0,
              "tpot_ms_p50": 10.0, "throughput_tok_s": 90.0, "e2e_latency_ms_p50": 1300.0}  # fmt: skip
    envelope = {"skill": "jetson-llm-benchmark", "runtime": "vllm", "model": "m", "sku": "thor", "generation": "thor",
                "product_line": "agx", "variant": "thor-t5000", "l4t": "38.4", "benchmark_mode": "native",
                "container": "", "config": {"input_len": 64, "output_len": 128, "num_prompts": 50},
                "runs": [run_of, {**run_of, "concurrency": 8}], "warnings": []}  # fmt: skip
    file = tmp_path / "same.json"
    file.write_text(json.dumps(envelope))
    done = run("judge", str(file), str(file), "--json", "--policy", "jetson")
    document = json.loads(done.stdout)
    assert document["verdict"] in ("disable", "inconclusive")
    assert done.returncode == {"disable": 10, "inconclusive": 11}[document["verdict"]]


def test_json_results_are_alone_on_stdout(tmp_path: Path) -> None:
    done = run("tune", "--dry-run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"].startswith("surespec/")
    assert document["arms"]
