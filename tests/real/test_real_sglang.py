"""SGLang on a CPU: its argument parser on the flags surespec writes, its server, and its failure with speculation.

Name its interpreter in ``SURESPEC_SGLANG_PYTHON``; without one (and none found) the tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surespec.bench.runner import BenchOptions, bench
from surespec.core import BASELINE, Arm
from surespec.engines.base import EngineSettings
from surespec.engines.failures import classify
from surespec.engines.sglang import SglangEngine, make_sglang
from surespec.errors import EngineError
from surespec.fetch import fetch, packaged_head
from surespec.tune_plan import make_arm

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
MODEL = "smollm2-135m"

PARSE = """
import json, sys
from sglang.srt.server_args import prepare_server_args
parsed = prepare_server_args(sys.argv[1:])
fields = ("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
          "context_length", "host", "port", "enable_metrics", "device")
print("ANSWER " + json.dumps({name: getattr(parsed, name) for name in fields}))
"""


@pytest.fixture(scope="module")
def engine() -> SglangEngine:
    try:
        made = make_sglang(MODEL, "fp32", EngineSettings(max_model_len=2048, max_num_seqs=2))
    except EngineError as error:
        pytest.skip(error.message)
    fetch(MODEL, "hf")
    return made


def parsed(engine: SglangEngine, arm: Arm, *more: str) -> tuple[dict[str, Any] | None, str]:
    """What SGLang makes of the arm's flags, and what it printed."""
    argv = engine.command(arm)
    flags = [*argv[argv.index("sglang.launch_server") + 1 :], *more]
    run = [str(engine.env.python), "-c", PARSE, *flags]
    done = subprocess.run(run, capture_output=True, text=True, timeout=500)
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    return (json.loads(answers[-1].removeprefix("ANSWER ")) if answers else None), done.stdout + done.stderr


def test_the_baseline_is_accepted(engine: SglangEngine) -> None:
    fields, said = parsed(engine, BASELINE)
    assert fields is not None, said[-2000:]
    assert fields["speculative_algorithm"] is None
    assert (fields["context_length"], fields["host"], fields["enable_metrics"]) == (2048, "127.0.0.1", True)


def test_an_eagle3_arm_is_accepted_with_its_numbers(engine: SglangEngine) -> None:
    fields, said = parsed(engine, make_arm("eagle3", 4, str(packaged_head("smollm2-135m-eagle3"))))
    assert fields is not None, said[-2000:]
    assert fields["speculative_algorithm"] == "EAGLE3"
    assert [fields[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens")] == [4, 1, 5]


def test_a_flag_it_does_not_know_is_an_unknown_field(engine: SglangEngine) -> None:
    fields, said = parsed(engine, BASELINE, "--speculative-num-draft-tokns", "4")
    assert fields is None
    failure = classify("sglang", "start", 2, None, said.splitlines())
    assert failure.kind == "unknown_field"
    assert failure.remedies[0].arguments == {"field": "--speculative-num-draft-tokns"}


def test_speculation_on_a_cpu_is_refused_before_it_fails(engine: SglangEngine) -> None:
    if not engine.cpu:
        pytest.skip("this SGLang has a GPU build of torch")
    assert "sgl_kernel" in engine.refusal(make_arm("ngram", 4))
    assert replace(engine, cpu=False).refusal(make_arm("ngram", 4)) == ""


def test_its_server_is_measured_without_speculation(engine: SglangEngine, tmp_path: Path) -> None:
    server = engine.start(BASELINE, tmp_path / "server.log")
    try:
        wanted = BenchOptions(server.endpoint, concurrency=(1,), prompts="copy", num_prompts=2, output_len=16)
        result = bench(wanted)
        page = urllib.request.urlopen(f"{server.endpoint}/metrics", timeout=20).read().decode()
    finally:
        server.stop()
    assert result.runs[0].failed == 0
    assert "sglang:" in page
    assert result.acceptance is None, "it speculates nothing, so there is no record of acceptance"


def test_speculation_on_a_cpu_really_fails_and_is_recognised(engine: SglangEngine, tmp_path: Path) -> None:
    """Past surespec's own refusal: its kernels are not there."""
    with pytest.raises(EngineError) as caught:
        engine.start(make_arm("ngram", 4), tmp_path / "server.log")
    failure = caught.value.failure
    assert failure is not None and failure.kind == "no_kernel", failure
    assert "sgl_kernel" in failure.sentence + failure.evidence
