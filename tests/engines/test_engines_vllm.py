"""vLLM found and put into words; no vLLM is started (tests/real does that)."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from surespec.core import BASELINE
from surespec.engines import EngineSettings, make_engine
from surespec.engines.base import shell_text
from surespec.engines.failures import classify
from surespec.engines.python_env import PythonEnv, ask, engines_home, find_env
from surespec.engines.vllm import VllmEngine, stage_of
from surespec.errors import ConfigError, EngineError, ModelError
from surespec.fetch import hf_folder
from surespec.models.bundled import bundled
from surespec.tune_plan import TuneOptions, make_arm, plan_tune, with_k

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 1024,
}  # fmt: skip
NGRAM = make_arm("ngram", 4)


@pytest.fixture(autouse=True)
def away(monkeypatch, tmp_path):
    """No engine of this machine takes part."""
    monkeypatch.setenv("SURESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SURESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("SURESPEC_VLLM_PYTHON", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path):
    """A model folder: its configuration, and a header without tensors."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return folder


def environment(folder, distribution, version, script=False):
    """A real, empty virtual environment that says it has a distribution."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    packages = next(folder.glob("lib/python3*/site-packages"))
    info = packages / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    if script:
        (folder / "bin" / "vllm").write_text(f"#!{python}\n")
        (folder / "bin" / "vllm").chmod(0o755)
    return python


def engine(folder, distribution="vllm-cpu", version="0.31.0", settings=None, precision="fp32"):
    env = PythonEnv(Path("/env/bin/python"), distribution, version, "test")
    return VllmEngine(str(folder), str(folder), env, precision, settings or EngineSettings())


def test_the_environment_named_by_the_user_wins(tmp_path, monkeypatch):
    named = environment(tmp_path / "named", "vllm-cpu", "0.31.0")
    installed = environment(engines_home() / "vllm", "vllm", "0.33.0", script=True)
    found = find_env("vllm", ("vllm", "vllm-cpu"))
    assert (found.python, found.distribution, found.version) == (installed, "vllm", "0.33.0")
    assert found.script("vllm") == installed.parent / "vllm"
    monkeypatch.setenv("SURESPEC_VLLM_PYTHON", str(named))
    assert find_env("vllm", ("vllm", "vllm-cpu")).version == "0.31.0"
    by_flag = find_env("vllm", ("vllm", "vllm-cpu"), installed.parent.parent)
    assert by_flag.version == "0.33.0", "a folder stands for its interpreter"


def test_a_console_script_on_path_leads_to_its_environment(tmp_path, monkeypatch):
    python = environment(tmp_path / "env", "vllm", "0.32.0", script=True)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "vllm").symlink_to(python.parent / "vllm")
    found = find_env("vllm", ("vllm", "vllm-cpu"))
    assert found.version == "0.32.0"
    assert found.found_by == "vllm on PATH"
    assert ask(python, ("no-such-distribution",)) is None


def test_no_vllm_is_said_with_what_to_do(tmp_path):
    with pytest.raises(EngineError, match="no vllm here") as caught:
        find_env("vllm", ("no-such-distribution",))
    assert "make engine-vllm" in caught.value.hint
    with pytest.raises(ConfigError, match="no interpreter"):
        find_env("vllm", ("vllm",), tmp_path / "nothing")
    with pytest.raises(ConfigError, match="has no vllm"):
        find_env("vllm", ("no-such-distribution",), Path(sys.executable))


def test_the_cpu_build_starts_by_module_in_float32(folder):
    argv = engine(folder).command(NGRAM, 8123)
    assert argv[0] == "env"
    assert argv[1] == "VLLM_CPU_KVCACHE_SPACE=1"
    assert argv[2:5] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    flags = dict(pairwise(argv))
    assert flags["--model"] == str(folder)
    assert flags["--host"] == "127.0.0.1"
    assert flags["--port"] == "8123"
    assert flags["--dtype"] == "float32"
    assert flags["--max-model-len"] == "1024", "the model's own limit is below 4096"
    assert flags["--served-model-name"] == "target"
    assert "--enforce-eager" in argv
    assert json.loads(flags["--speculative-config"]) == NGRAM.speculative_config
    assert "--speculative-config" not in engine(folder).command(BASELINE)
    assert "bfloat16" in engine(folder, precision="bf16").command(BASELINE)


def test_the_gpu_build_starts_by_its_script_and_keeps_its_defaults(folder, tmp_path):
    python = environment(tmp_path / "env", "vllm", "0.33.0", script=True)
    built = replace(engine(folder), env=find_env("vllm", ("vllm",), python))
    argv = built.command(BASELINE)
    assert argv[:3] == [str(python.parent / "vllm"), "serve", str(folder)]
    assert not {"--dtype", "--enforce-eager", "--max-model-len", "env"} & set(argv)


def test_a_hugging_face_id_has_a_forecast_too(folder, monkeypatch):
    """vLLM fetches an id itself, so its files need not lie here: the facts say its size, or a guess does."""
    monkeypatch.setattr("surespec.engines.vllm.resolve", lambda name: bundled(name) or pytest.fail("asked a network"))
    known = replace(engine(folder), model="Qwen/Qwen3-0.6B", target="Qwen/Qwen3-0.6B").pace()
    larger = replace(engine(folder), model="Qwen/Qwen3-4B", target="Qwen/Qwen3-4B").pace()
    assert engine(folder).pace().step_ms < known.step_ms < larger.step_ms


def test_kv_space_is_enough_for_all_requests_at_full_length(folder, monkeypatch):
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "num_hidden_layers": 64, "max_position_embeddings": 8192})
    )
    # 64 layers x 2 heads x (16 + 16) values x 4 bytes x 4096 tokens x 16 requests = 1 GiB, and a tenth more
    wide = engine(folder, settings=EngineSettings(max_num_seqs=16))
    assert wide.command(BASELINE)[1] == "VLLM_CPU_KVCACHE_SPACE=2"
    assert engine(folder, settings=EngineSettings(max_num_seqs=1)).command(BASELINE)[1].endswith("=1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert wide.command(BASELINE)[1].endswith("=7")


@pytest.mark.parametrize(
    ("arm", "version", "word"),
    [
        (NGRAM, "0.31.0", ""),
        (make_arm("eagle3", 3, "head"), "0.31.0", ""),
        (make_arm("eagle3", 3, "head"), "0.9.0", "needs vLLM 0.9.1"),
        (make_arm("draft_model", 4, "small"), "0.12.0", "NotImplementedError"),
        (with_k(NGRAM, 4, alone=True), "0.23.0", "per_batch_size needs vLLM 0.24"),
        (with_k(NGRAM, 4, alone=True), "0.24.0", ""),
        (BASELINE, "0.8.0", ""),
    ],
)
def test_arms_a_release_cannot_run_are_refused(folder, arm, version, word):
    said = engine(folder, version=version).refusal(arm)
    assert word in said
    assert bool(said) == bool(word)
    assert engine(folder, version=version).k_by_batch_size == (version in ("0.24.0", "0.31.0"))


def test_names_become_what_vllm_takes(folder, tmp_path):
    python = environment(tmp_path / "env", "vllm-cpu", "0.31.0")
    settings = EngineSettings(python=python)
    named = make_engine("vllm", model="smollm2-135m", settings=settings)
    argv = named.command(BASELINE)
    assert argv[argv.index("--model") + 1] == str(hf_folder("smollm2-135m"))
    assert argv[argv.index("--served-model-name") + 1] == "smollm2-135m"
    assert make_engine("vllm", model="org/model", settings=settings).command(BASELINE)[-1] != ""
    assert named.drafter(str(folder)) == str(folder)
    assert named.drafter("org/head") == "org/head"
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="not a file") as caught:
        make_engine("vllm", model=str(gguf), settings=settings)
    assert "--format hf" in caught.value.hint
    with pytest.raises(ModelError, match="no model"):
        make_engine("vllm", model="nonsense", settings=settings)
    with pytest.raises(ConfigError, match="int8"):
        make_engine("vllm", model=str(folder), precision="int8", settings=settings)


def test_a_plan_for_vllm_says_what_will_run(folder, tmp_path):
    python = environment(tmp_path / "env", "vllm-cpu", "0.14.0")
    options = TuneOptions(
        engine="vllm", engine_python=str(python), model=str(folder), draft_model=str(folder), out=tmp_path / "run"
    )
    plan = plan_tune(options)
    assert [arm.name for arm in plan.arms] == ["baseline", "ngram-k5"]
    assert any("draft_model-k4 is left out" in remark for remark in plan.remarks)
    assert plan.commands["ngram-k5"] == shell_text(make_engine_of(options).command(plan.arms[1]))


def make_engine_of(options):
    settings = EngineSettings(python=Path(options.engine_python), max_num_seqs=8)
    return make_engine("vllm", model=options.model, settings=settings)


def test_remedies_change_the_launch_or_are_passed_over(folder):
    built = engine(folder)
    again = classify("vllm", "start", 1, None, ["?"]).remedies[0]
    assert again.name == "again"
    assert built.mended(NGRAM, again) is built
    shorter = again.model_copy(update={"name": "shorter_context", "arguments": {"factor": 0.5, "limit": 512}})
    once = built.mended(NGRAM, shorter)
    assert once.command(NGRAM)[once.command(NGRAM).index("--max-model-len") + 1] == "512"
    assert once.mended(NGRAM, shorter) is None, "the limit is reached"
    lower = again.model_copy(update={"name": "lower_utilization", "arguments": {"step": -0.05, "limit": 0.3}})
    assert built.mended(NGRAM, lower) is None, "there is no such budget on a CPU"
    gpu = engine(folder, "vllm").mended(NGRAM, lower)
    assert gpu.command(NGRAM)[-3] == "0.87"
    drop = again.model_copy(update={"name": "drop_field", "arguments": {"field": "prompt_lookup_min"}})
    assert "prompt_lookup_min" not in built.mended(NGRAM, drop).command(NGRAM)[-1]
    assert built.mended(BASELINE, drop) is None


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("Initializing a V1 LLM engine (v0.31.0) with config: model='/m'", "starting the engine"),
        ("Starting to load model /m...", "loading the weights"),
        ("Loading drafter model...", "loading the drafter"),
        ("Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup.", None),
        ("torch.compile takes 32.1 s in total", "compiling"),
        ("CPU KV cache size: 22,528 tokens, Maximum concurrency for 2,048 tokens per request: 11.00x", "warming up"),
        ("Starting vLLM server on http://127.0.0.1:18311", "opening its port"),
    ],
)
def test_the_log_tells_the_stage(line, stage):
    assert stage_of(line) == stage
