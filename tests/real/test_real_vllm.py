"""vLLM on this machine's CPU, driven for real: `make test-real`. Each server start takes half a minute or more."""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from real_tools import Stages, assert_same_acceptance, nothing_left, workers
from surespec.bench.runner import BenchOptions, bench
from surespec.core import BASELINE
from surespec.dialects.vllm import field_problem
from surespec.engines import EngineSettings, make_engine
from surespec.engines.existing import find_existing
from surespec.engines.handover import stop_tree
from surespec.engines.process import free_port, port_is_free, start_server
from surespec.engines.ready import stream_once
from surespec.errors import EngineError, Interrupted, PortInUseError, UsageError
from surespec.fetch import fetch, packaged_head
from surespec.planning import PlanRequest, make_plan
from surespec.recipe import read_recipe
from surespec.recipe.command import command_of
from surespec.rules import load_topic
from surespec.store import Bundle
from surespec.tune import tune
from surespec.tune_plan import TuneOptions, make_arm

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

MODEL = "smollm2-135m"
SETTINGS = EngineSettings(max_model_len=2048, max_num_seqs=4)

ASK_CONFIG = """
import json, os, sys
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
from vllm.engine.arg_utils import EngineArgs
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
model, *configs = sys.argv[1:]
for config in configs:
    try:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        argv = ["--model", model, "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
        arguments = parser.parse_args([*argv, "--speculative-config", config])
        EngineArgs.from_cli_args(arguments).create_engine_config()
        print("ANSWER " + json.dumps(""))
    except SystemExit as error:
        print("ANSWER " + json.dumps(f"the argument parser left with {error.code}"))
    except Exception as error:
        print("ANSWER " + json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.fixture(scope="module")
def model():
    """The Hugging Face folder of the small model, fetched or made once."""
    return fetch(MODEL, "hf")


@pytest.fixture(scope="module")
def head():
    return str(packaged_head("smollm2-135m-eagle3"))


@pytest.fixture(scope="module")
def vllm(model):
    return make_engine("vllm", model=MODEL, settings=SETTINGS)


@pytest.fixture(autouse=True)
def clean():
    """Whatever a test does, no process of it may stay."""
    with nothing_left():
        yield


@pytest.fixture
def options(tmp_path, model):
    """A short tune with vLLM."""

    def make(**changes):
        defaults = {
            "engine": "vllm", "model": MODEL, "concurrency": (1,), "num_prompts": 8, "output_len": 48,
            "max_model_len": 2048, "budget_s": 900.0, "out": tmp_path / "run",
        }  # fmt: skip
        return TuneOptions(**{**defaults, **changes})

    return make


def measured(engine, arm, prompts, tmp_path, num_prompts, output_len=64):
    """One launch of an arm and its benchmark at concurrency 1."""
    server = engine.start(arm, tmp_path / f"{engine.name}-{arm.name}.log")
    try:
        wanted = BenchOptions(
            endpoint=server.endpoint, concurrency=(1,), prompts=prompts, num_prompts=num_prompts, output_len=output_len
        )
        return bench(wanted)
    finally:
        server.stop()


def raw_start(vllm, arm, tmp_path, config=None, extra=(), timeout_s=300.0, kv_space=True):
    """Start vLLM by hand with a speculative config as it is, past surespec's own gates.

    ``kv_space`` False: without the variable that gives a CPU's KV cache its size, so that flags can.
    """
    port = free_port()
    argv = vllm.command(arm, port)
    if not kv_space:
        assert argv[0] == "env"
        argv = argv[2:]
    if config is not None:
        argv = [*argv, "--speculative-config", json.dumps(config)]
    argv = [*argv, *extra]
    log = tmp_path / "server.log"
    with pytest.raises(EngineError) as caught:
        start_server(argv, port=port, log_path=log, timeout_s=timeout_s, engine="vllm", env={"HF_HUB_OFFLINE": "1"})
    assert port_is_free(port)
    assert log.stat().st_size > 0
    return caught.value


# --- complete runs ----------------------------------------------------------------------------------------------------


def test_ngram_on_copying_is_kept_by_the_command_line(tmp_path, model):
    out = tmp_path / "run"
    argv = [
        sys.executable, "-m", "surespec", "tune", "--engine", "vllm", "--model", MODEL, "--prompts", "copy",
        "--concurrency", "1", "--num-prompts", "8", "--output-len", "48", "--max-model-len", "2048", "--out", str(out),
        "--budget", "20m", "--json",
    ]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    judged = json.loads(done.stdout)
    assert judged["schema"] == "surespec/tune/1"
    assert judged["verdict"] == "keep"
    assert judged["speculative_config"]["method"] == "ngram"
    assert judged["ratios"]["c1"]["throughput_tok_s"]["low"] > 1.3
    assert "vllm.entrypoints" in judged["command"] or "vllm serve" in judged["command"]
    assert judged["lossless"] is True
    assert (out / "report.html").stat().st_size > 10_000
    bundle = Bundle.open(out)
    assert bundle.problems == []
    assert all((bundle.launch_dir(launch.index, launch.arm) / "server.log").exists() for launch in bundle.launches())


def test_a_head_that_drafts_badly_is_never_kept(options, head, tmp_path):
    """The packaged head with its output turned round: it fits, loads and drafts, and what it drafts is never right.

    (The head itself gains about a tenth on chat here, which is neither a keep nor a disable.)
    """
    bad = tmp_path / "bad-head"
    bad.mkdir()
    (bad / "config.json").write_bytes((Path(head) / "config.json").read_bytes())
    data = bytearray((Path(head) / "model.safetensors").read_bytes())
    header = int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8 : 8 + header])["lm_head.weight"]["data_offsets"]
    words = np.frombuffer(data, np.uint16, (last - first) // 2, 8 + header + first)
    words ^= 0x8000  # the signs of the bfloat16 words
    (bad / "model.safetensors").write_bytes(data)
    progress = Stages()
    judged = tune(options(prompts="chat", eagle3_head=str(bad), methods=("eagle3",), num_prompts=10), progress)
    # The best k is 1, which costs so little that on a noisy machine the interval may reach beyond the threshold.
    assert judged.verdict in ("disable", "inconclusive"), judged.why
    ratio = judged.ratios["c1"].throughput_tok_s
    assert (judged.verdict == "disable") == (ratio.high < 1.1)
    assert judged.speculative_config is None
    assert "speculative" not in judged.command
    assert ratio.low < 1
    run = next(launch for launch in judged.launches if launch.arm.startswith("eagle3")).runs[0]
    assert run.acceptance.drafts > 50
    order = [progress.stages.index(s) for s in ("loading the weights", "loading the drafter", "warming up", "stopping")]
    assert len(set(order)) == 4


def test_its_own_draft_is_the_upper_bound(vllm, model, tmp_path):
    arm = make_arm("draft_model", 4, str(model))
    result = measured(vllm, arm, "chat", tmp_path, 4)
    assert result.acceptance.drafts > 30
    assert result.acceptance.length > 4.9, "a greedy target agrees with itself"


# --- the embedded engine beside vLLM ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "prompts", "num"), [("eagle3", "chat", 12), ("ngram", "copy", 12)])
def test_acceptance_agrees_with_the_embedded_engine(vllm, head, tmp_path, method, prompts, num):
    arm = make_arm(method, 5, head if method == "eagle3" else None)
    theirs = measured(vllm, arm, prompts, tmp_path, num)
    ours = measured(make_engine("local", model=MODEL), arm, prompts, tmp_path, num)
    assert theirs.acceptance.drafts > 100
    assert_same_acceptance(ours.acceptance, theirs.acceptance)
    same = [a.text == b.text for a, b in zip(ours.runs[0].traces, theirs.runs[0].traces, strict=True)]
    assert np.mean(same) >= 0.5, "greedy texts of the same weights"


# --- configurations ---------------------------------------------------------------------------------------------------


def ask_config(vllm, model, configs):
    """Why the real SpeculativeConfig rejects each config; empty where it takes it."""
    argv = [str(vllm.env.python), "-c", ASK_CONFIG, str(model), *map(json.dumps, configs)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=600)
    answers = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(answers) == len(configs), done.stderr[-2000:]
    return answers


def test_configs_of_the_plan_are_taken_and_fields_of_other_versions_are_not(vllm, model, head):
    version = vllm.env.version
    asked = PlanRequest(model=str(model), engine="vllm", engine_version=version, offline=True)
    plans = [make_plan(asked), make_plan(replace(asked, drafter=head))]
    planned = [arm.speculative_config for plan in plans for arm in plan.arms]
    assert {config["method"] for config in planned} >= {"ngram", "eagle3"}
    tuned = [make_arm("eagle3", 5, head), make_arm("draft_model", 4, str(model)), make_arm("ngram", 5)]
    taken = planned + [arm.speculative_config for arm in tuned]
    fields = load_topic("vllm_fields")["field"]
    foreign = [name for name in fields if field_problem(name, version)]
    assert "fly_window_size" in foreign
    ngram = make_arm("ngram", 3).speculative_config
    rejected = [{**ngram, name: 1} for name in foreign]
    rejected += [{**ngram, "num_speculative_tokens": 0}, {**ngram, "num_speculative_tokenz": 3}]
    rejected += [{**ngram, "prompt_lookup_min": 9}]
    answers = ask_config(vllm, model, taken + rejected)
    assert answers[: len(taken)] == [""] * len(taken)
    wrongly = [config for config, why in zip(rejected, answers[len(taken) :], strict=True) if not why]
    assert wrongly == []


def test_the_table_of_fields_is_that_of_the_installed_release(vllm):
    code = (
        "import dataclasses, json; from vllm.config import SpeculativeConfig as C;"
        "print('ANSWER ' + json.dumps([f.name for f in dataclasses.fields(C)]))"
    )
    done = subprocess.run([str(vllm.env.python), "-c", code], capture_output=True, text=True, timeout=300)
    real = set(json.loads(next(line[7:] for line in done.stdout.splitlines() if line.startswith("ANSWER "))))
    table = {name for name in load_topic("vllm_fields")["field"] if not field_problem(name, vllm.env.version)}
    internal = {"target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"}
    trap = {"tensor_parallel_size"}  # a field that always raises; never to be written
    assert table - real == set()
    assert real - table - internal - trap == set()


# --- faults -----------------------------------------------------------------------------------------------------------


def test_an_unknown_key(vllm, tmp_path):
    error = raw_start(vllm, BASELINE, tmp_path, {"method": "ngram", "num_speculative_tokens": 3, "lookup": 4})
    assert error.failure.kind == "unknown_field"
    assert "lookup" in error.failure.sentence


def wrong_head(head, folder, **changes):
    """A head with the weights of another target (hidden size 512); ``changes`` to its configuration."""
    folder.mkdir()
    config = json.loads((Path(head) / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"fc.weight": (512, 1536), "lm_head.weight": (config["draft_vocab_size"], 512), "norm.weight": (512,)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def test_a_head_whose_configuration_tells_it_apart_is_not_launched(options, head, tmp_path):
    other = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 256}
    wrong = wrong_head(head, tmp_path / "wrong-head", **other)
    with pytest.raises(UsageError, match=r"hidden size is 512, the target's 576.*H3"):
        tune(options(eagle3_head=str(wrong), methods=("eagle3",)))
    assert not (tmp_path / "run").exists()


def test_a_head_of_another_target_fails_the_arm_and_the_bundle_resumes(options, head, tmp_path):
    """Its configuration claims to fit; its weights do not."""
    wrong = wrong_head(head, tmp_path / "wrong-head")
    judged = tune(options(eagle3_head=str(wrong), methods=("eagle3",), num_prompts=2, output_len=16))
    assert judged.verdict == "failed"
    failed = judged.launches[-1]
    assert (failed.arm, failed.status, failed.failure_kind) == ("eagle3-k5", "failed", "head_mismatch")
    assert judged.launches[0].status == "ok"
    again = tune(options(resume=True, num_prompts=2, output_len=16))
    assert [launch.status for launch in again.launches].count("ok") == 1, "the baseline was not measured again"
    assert again.verdict == "failed"


def test_synthetic_acceptance_starts_and_dies_at_the_first_request(vllm, head, tmp_path):
    config = {
        "method": "eagle3", "model": head, "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0,
    }  # fmt: skip
    error = raw_start(vllm, BASELINE, tmp_path, config)
    assert error.failure.moment == "first_request"
    assert "CPU" in f"{error.failure.sentence} {error.failure.evidence}"


def test_a_port_that_is_taken(vllm, tmp_path):
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        with pytest.raises(PortInUseError) as caught:
            start_server(
                vllm.command(BASELINE, port), port=port, log_path=tmp_path / "log", timeout_s=60, engine="vllm"
            )
    assert caught.value.failure.kind == "port_in_use"
    assert not (tmp_path / "log").exists()


def test_a_kv_cache_too_small_for_one_request(vllm, tmp_path):
    error = raw_start(vllm, BASELINE, tmp_path, extra=("--kv-cache-memory-bytes", "16M"), kv_space=False)
    assert error.failure.kind == "no_kv_space"
    assert any(remedy.name == "shorter_context" for remedy in error.failure.remedies)


def test_a_worker_killed_while_it_is_measured_is_launched_again(options):
    class Killer(Stages):
        killed = False

        def benching(self, phase, concurrency, done, total):
            if phase == "run" and done == 2 and not self.killed:
                self.killed = True
                for process in workers("VLLM::Worker") or workers("VLLM::EngineCor"):
                    process.kill()

    progress = Killer()
    judged = tune(options(prompts="copy", methods=("ngram",), num_prompts=6, budget_s=100.0), progress)
    killed, again = judged.launches[:2]
    assert (killed.arm, killed.status, killed.failure_kind) == ("baseline", "failed", "crash_under_load")
    assert (again.arm, again.status, again.tried) == ("baseline", "ok", ("again",))
    assert any("baseline failed" in note for note in progress.notes)


def test_stopped_while_it_starts(options):
    class Stopper(Stages):
        def stage(self, text):
            super().stage(text)
            if text == "loading the weights":
                raise KeyboardInterrupt

    begun = time.monotonic()
    progress = Stopper()
    with pytest.raises(Interrupted):
        tune(options(methods=("ngram",)), progress)
    assert time.monotonic() - begun < 300
    bundle = Bundle.open(options().out)
    assert [launch.status for launch in bundle.launches()] == ["interrupted"]


def test_the_running_server_of_a_recipe_makes_room_and_comes_back(vllm, model, tmp_path):
    """The user's own command: refused beside the running server, tuned in its place, and then it runs as it did."""
    port = free_port()
    recipe = tmp_path / "serve.sh"
    recipe.write_text(
        "export VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1\n"
        f"exec {vllm.env.python} -m vllm.entrypoints.openai.api_server --model {model} \\\n"
        f"  --host 127.0.0.1 --port {port} --served-model-name small \\\n"
        "  --dtype float32 --enforce-eager --max-model-len 2048\n"
    )
    # Started as a person would, from a shell that is gone: it is no child of this process.
    subprocess.run(["bash", "-c", f"setsid bash {recipe} > {tmp_path}/user.log 2>&1 &"], check=True)
    try:
        wait_for_answer(port)
        before = next(found for found in find_existing() if found.port == port)
        wanted = TuneOptions(
            recipe=str(recipe), methods=("ngram",), concurrency=(1,), prompts="copy", num_prompts=3, output_len=32,
            budget_s=100.0, out=tmp_path / "run",
        )  # fmt: skip
        with pytest.raises(EngineError, match="carries one model at a time"):
            tune(wanted)
        judged = tune(replace(wanted, stop_existing=True))
        assert [launch.status for launch in judged.launches[:2]] == ["ok", "ok"], judged.launches
        assert judged.lossless is not False
        wait_for_answer(port)
        back = [found for found in find_existing() if found.port == port]
        assert len(back) == 1 and back[0].pid != before.pid, "the old process made room and came back"
        assert tuple(back[0].argv) == command_of(read_recipe(recipe), os.environ).words
    finally:
        for found in find_existing():
            if found.port == port:
                stop_tree(found.pid)


def wait_for_answer(port):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            if stream_once("127.0.0.1", port) is None:
                return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(1)
    raise AssertionError(f"nothing answered on port {port}")


def test_surespec_killed_leaves_no_engine(vllm, tmp_path):
    code = (
        "import sys, pathlib; from surespec.core import BASELINE; from surespec.engines import *\n"
        "s = EngineSettings(python=pathlib.Path(sys.argv[1]), max_model_len=1024)\n"
        f"e = make_engine('vllm', model={MODEL!r}, settings=s)\n"
        "e.start(BASELINE, pathlib.Path(sys.argv[2]), lambda t: print(t, flush=True))\n"
    )
    argv = [sys.executable, "-c", code, str(vllm.env.python), str(tmp_path / "log")]
    parent = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(300, parent.kill)
    watchdog.start()
    for line in parent.stdout:
        if "weights" in line:
            break
    assert workers("VLLM::"), "its workers were running"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    watchdog.cancel()
    time.sleep(3)
