"""The real llama.cpp: what the engine says it does is what the server does. ``make test-real LLAMACPP=1``.

It uses the program found (``SURESPEC_LLAMACPP_PROGRAM``, the installed one, or PATH); without one it is skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surespec.bench.runner import BenchOptions, bench
from surespec.core import BASELINE, Arm, BenchResult
from surespec.engines.base import EngineSettings
from surespec.engines.failures import classify
from surespec.engines.llamacpp import LlamaCppEngine, find_build, make_llamacpp
from surespec.engines.log_tail import read_tail
from surespec.errors import EngineError, SurespecError
from surespec.tune import tune as run_tune
from surespec.tune_plan import TuneOptions, make_arm, with_k

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def engine() -> LlamaCppEngine:
    try:
        find_build()
    except EngineError as error:
        pytest.skip(error.message)
    made = make_llamacpp(MODEL, "fp32", EngineSettings(max_model_len=2048, max_num_seqs=2))
    made.prepare([BASELINE], lambda *_: None)
    return made


def served(engine: LlamaCppEngine, arm: Arm, folder: Path, prompts: str = "copy", count: int = 6) -> BenchResult:
    """One launch of an arm, measured a little."""
    folder.mkdir(parents=True, exist_ok=True)
    server = engine.start(arm, folder / "server.log")
    try:
        options = BenchOptions(server.endpoint, concurrency=(1,), prompts=prompts, num_prompts=count, output_len=64)
        return bench(options)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def baseline(engine: LlamaCppEngine, tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    return served(engine, BASELINE, tmp_path_factory.mktemp("baseline"))


def texts(result: BenchResult) -> list[str]:
    return [trace.text for trace in result.runs[0].traces]


def test_the_baseline_does_not_draft(baseline: BenchResult) -> None:
    assert baseline.runs[0].failed == 0
    assert baseline.acceptance is None


@pytest.mark.parametrize("k", [3, 6])
def test_ngram_drafts_k_tokens_at_most(engine: LlamaCppEngine, baseline: BenchResult, tmp_path: Path, k: int) -> None:
    """What ``--spec-draft-n-max`` would not do: the counters by position end at k."""
    result = served(engine, make_arm("ngram", k), tmp_path)
    assert result.acceptance is not None
    assert len(result.acceptance.accepted_per_position) == k
    assert result.acceptance.drafted <= k * result.acceptance.drafts
    assert sum(result.acceptance.accepted_per_position) == result.acceptance.accepted > 0
    assert texts(result) == texts(baseline), "greedy output is the target's own"


def test_a_target_drafting_for_itself_is_always_right(
    engine: LlamaCppEngine, baseline: BenchResult, tmp_path: Path
) -> None:
    result = served(engine, make_arm("draft_model", 4, engine.drafter(MODEL)), tmp_path)
    assert result.acceptance is not None
    assert result.acceptance.rate > 0.95
    assert texts(result) == texts(baseline)


def test_failures_are_recognised(engine: LlamaCppEngine, tmp_path: Path) -> None:
    absent = make_arm("draft_model", 3, str(tmp_path / "absent.gguf"))
    with pytest.raises(EngineError):
        engine.start(absent, tmp_path / "absent.log")
    failure = classify("llamacpp", "start", 1, None, read_tail(tmp_path / "absent.log"))
    assert failure.kind == "configuration_rejected" and "absent.gguf" in failure.sentence


def test_a_flag_the_build_does_not_know(engine: LlamaCppEngine) -> None:
    argv = [*engine.command(BASELINE), "--no-such-flag"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    failure = classify("llamacpp", "start", done.returncode, None, (done.stdout + done.stderr).splitlines())
    assert failure.kind == "unknown_field"
    assert {"field": "--no-such-flag"} in [remedy.arguments for remedy in failure.remedies]


def tune(out: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    argv = [sys.executable, "-m", "surespec", "tune", "--json", "--engine", "llamacpp", "--model", MODEL]
    done = subprocess.run([*argv, "--out", str(out), *flags], capture_output=True, text=True, timeout=850)
    assert done.stdout, done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout)


def test_a_whole_tune_on_copy_prompts(engine: LlamaCppEngine, tmp_path: Path) -> None:
    """Whatever the verdict on this machine, it follows from the ratios, and the command repeats the arm."""
    flags = ["--concurrency", "1", "--prompts", "copy", "--num-prompts", "12", "--output-len", "64", "--budget", "8m"]
    code, document = tune(tmp_path / "run", *flags)
    assert document["schema"] == "surespec/tune/1"
    assert (document["verdict"], code) in {
        ("keep", 0), ("marginal", 11), ("inconclusive", 11), ("disable", 10),
    }  # fmt: skip
    ratio = document["ratios"]["c1"]["throughput_tok_s"]
    assert ratio["low"] <= ratio["estimate"] <= ratio["high"]
    if document["verdict"] == "keep":
        assert "--spec-type ngram-simple" in document["command"]
        assert ratio["low"] > 1


def test_a_draft_as_large_as_its_target_is_disabled(engine: LlamaCppEngine, tmp_path: Path) -> None:
    """The honest no: every draft is accepted, and each drafted token costs what a token costs."""
    options = TuneOptions(
        engine="llamacpp", model=MODEL, draft_model=MODEL, methods=("draft_model",), concurrency=(1,), prompts="chat",
        num_prompts=8, output_len=48, budget_s=600, out=tmp_path / "run",
    )  # fmt: skip
    judged = run_tune(options)
    assert judged.verdict == "disable", judged.why
    assert judged.ratios["c1"].throughput_tok_s.estimate < 1.1


def test_k_of_a_predicted_arm_is_launched(engine: LlamaCppEngine) -> None:
    arm = with_k(make_arm("ngram", 8), 3)
    assert engine.command(arm)[-2:] == ["--spec-ngram-simple-size-m", "3"]


def test_an_unreadable_model_is_a_clear_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 64)
    try:
        made = make_llamacpp(str(broken), "fp32", EngineSettings())
    except EngineError as error:
        pytest.skip(error.message)
    with pytest.raises(SurespecError) as caught:
        made.start(BASELINE, tmp_path / "log")
    assert "Traceback" not in str(caught.value)
