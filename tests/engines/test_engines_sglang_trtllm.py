"""SGLang and TensorRT-LLM by the letter of their sources: commands, files, stages. Not verified on hardware."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from surespec.core import BASELINE, Arm
from surespec.engines.base import EngineSettings
from surespec.engines.failures import classify
from surespec.engines.log_tail import clean
from surespec.engines.python_env import PythonEnv
from surespec.engines.sglang import SglangEngine
from surespec.engines.sglang import stage_of as sglang_stage
from surespec.engines.trtllm import TrtllmEngine, make_trtllm
from surespec.engines.trtllm import stage_of as trtllm_stage
from surespec.errors import ConfigError, EngineError
from surespec.tune_plan import make_arm, with_k

SETTINGS = EngineSettings(max_model_len=2048, max_num_seqs=4)
ENV = PythonEnv(Path("/opt/sglang/bin/python"), "sglang", "0.5.23", "test")
SGLANG = SglangEngine(model="org/target", target="org/target", env=ENV, cpu=False, settings=SETTINGS)
TRTLLM = TrtllmEngine(model="org/target", target="org/target", program=Path("/opt/bin/trtllm-serve"), settings=SETTINGS)
EAGLE = make_arm("eagle3", 4, "org/head")
NGRAM = make_arm("ngram", 5)


def after(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_sglang_baseline_publishes_metrics_and_does_not_speculate() -> None:
    argv = SGLANG.command(BASELINE, 8123)
    assert argv[:3] == ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
    assert after(argv, "--host") == "127.0.0.1" and after(argv, "--port") == "8123"
    assert after(argv, "--context-length") == "2048" and after(argv, "--max-running-requests") == "4"
    assert "--enable-metrics" in argv
    assert not [word for word in argv if word.startswith("--speculative")]


def test_sglang_speaks_its_three_numbers() -> None:
    argv = SGLANG.command(EAGLE)
    assert after(argv, "--speculative-algorithm") == "EAGLE3"
    assert after(argv, "--speculative-draft-model-path") == "org/head"
    assert after(argv, "--speculative-num-steps") == "4"
    assert after(argv, "--speculative-eagle-topk") == "1"
    assert after(argv, "--speculative-num-draft-tokens") == "5"
    assert after(SGLANG.command(NGRAM), "--speculative-algorithm") == "NGRAM"


def test_sglang_on_a_cpu_serves_the_baseline_only() -> None:
    cpu = replace(SGLANG, cpu=True)
    argv = cpu.command(BASELINE)
    assert after(argv, "--device") == "cpu" and after(argv, "--attention-backend") == "torch_native"
    assert after(argv, "--max-total-tokens") == "8192"
    assert "sgl_kernel" in cpu.refusal(NGRAM)
    assert cpu.refusal(BASELINE) == "" == SGLANG.refusal(NGRAM)


@pytest.mark.parametrize(
    ("engine", "method"),
    [(SGLANG, "suffix"), (TRTLLM, "suffix"), (TRTLLM, "dspark")],
    ids=lambda x: getattr(x, "name", x),
)
def test_methods_they_do_not_have_are_refused(engine, method: str) -> None:
    arm = Arm(name="x-k3", method=method, num_speculative_tokens=3, speculative_config={"method": method})
    assert method in engine.refusal(arm)


@pytest.mark.parametrize("engine", [SGLANG, TRTLLM], ids=lambda engine: engine.name)
def test_what_can_be_mended(engine) -> None:
    remedies = {
        r.name: r
        for kind in ("CUDA out of memory", "failed: Not enough memory. Please try to increase --mem-fraction-static")
        for r in classify("sglang", "start", 1, None, [kind]).remedies
    }
    less = engine.mended(BASELINE, remedies["lower_utilization"])
    assert "0.8" in " ".join(less.command(BASELINE)) and "0.8" not in " ".join(engine.command(BASELINE))
    assert "1024" in " ".join(engine.mended(BASELINE, remedies["shorter_context"]).command(BASELINE))
    assert engine.mended(BASELINE, remedies["smaller_draft"]) is None


@pytest.mark.parametrize(
    ("stage_of", "line", "stage"),
    [
        (sglang_stage, "[2026-05-05 02:22:14 TP0] Load weight begin. avail mem=78.58 GB", "loading the weights"),
        (sglang_stage, "[2026-05-05 02:22:20] Capture cuda graph begin. This can take up", "capturing graphs"),
        (sglang_stage, "[2026-05-05 02:22:30] The server is fired up and ready to roll!", "opening its port"),
        (sglang_stage, "[2026-05-05 02:22:30] Decode batch. accept len: 2.9, accept rate: 0.6", None),
        (trtllm_stage, "[07/08/2025-19:47:15] [TRT-LLM] [I] Loading safetensors weights", "loading the weights"),
        (trtllm_stage, "INFO:     Application startup complete.", "opening its port"),
    ],
)
def test_stages(stage_of, line: str, stage: str | None) -> None:
    assert stage_of(clean(line)) == stage


def test_trtllm_writes_the_arm_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = TRTLLM.command(EAGLE, 8123)
    assert argv[:2] == ["sh", "-c"]
    assert "exec /opt/bin/trtllm-serve org/target --host 127.0.0.1 --port 8123" in argv[2]
    write = argv[2].split(" && exec ")[0]
    subprocess.run(["sh", "-c", write], cwd=tmp_path, check=True)
    document = YAML(typ="safe").load(next(tmp_path.glob("*.yaml")).read_text())
    assert document["speculative_config"] == {
        "decoding_type": "Eagle3",
        "max_draft_len": 4,
        "speculative_model": "org/head",
    }
    assert document["enable_iter_perf_stats"] is True and document["return_perf_metrics"] is True


def test_trtllm_takes_k_by_batch_size() -> None:
    text = TRTLLM.command(with_k(EAGLE, 3, alone=True))[2]
    assert "draft_len_schedule" in text and TRTLLM.k_by_batch_size


def test_trtllm_start_writes_its_file_beside_the_log(tmp_path: Path) -> None:
    program = tmp_path / "trtllm-serve"
    program.write_text(
        '#!/bin/sh\nfor word; do file=$word; done\ncat "$file"; echo "RuntimeError: no GPU" >&2; exit 1\n'
    )
    program.chmod(0o755)
    engine = make_trtllm("org/target", "fp32", EngineSettings(program=program))
    folder = tmp_path / "launch"
    folder.mkdir()
    with pytest.raises(EngineError, match="no GPU"):
        engine.start(EAGLE, folder / "server.log")
    assert "Eagle3" in (folder / "server.log").read_text()


def test_trtllm_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="PATH"):
        make_trtllm("org/target", "fp32", EngineSettings())
    with pytest.raises(ConfigError, match="engine-python"):
        make_trtllm("org/target", "fp32", EngineSettings(python=tmp_path / "python"))
