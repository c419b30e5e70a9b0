"""The same arm in every engine's words, quoted so that a shell, YAML and a JSON parser read the same back."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surespec.dialects import Deployment, render, to_yaml
from surespec.dialects.base import shell_line
from surespec.dialects.versions import at_least, at_most, release
from surespec.dialects.vllm import field_problem, gate, method_problem
from surespec.models import bundled
from surespec.plan import runtime_for
from surespec.plan_nouns import Device, Drafter, Model
from surespec.probe.table import simulated_device

HEAD = Drafter(method="eagle3", id="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
CONFIG: dict[str, Any] = {
    "method": "eagle3",
    "model": HEAD.id,
    "num_speculative_tokens": 5,
    "draft_tensor_parallel_size": 1,
}


def known(name: str) -> Model:
    model = bundled(name)
    assert model is not None
    return model


def deployment(device: str | Device = "h100", engine: str = "vllm", **changes: Any) -> Deployment:
    found = simulated_device(device) if isinstance(device, str) else device
    fields: dict[str, Any] = {
        "device": found,
        "runtime": runtime_for(found, engine),
        "model": known("Llama-3.1-8B"),
        "max_model_len": 8192,
        "utilization": 0.85,
        "config": CONFIG,
        "drafter": HEAD,
    }
    return Deployment(**{**fields, **changes})


def after(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


@pytest.mark.parametrize("device", ["thor-t5000", "orin-agx-64gb", "h100", "cpu"])
def test_vllm_json_survives_the_shell(device: str) -> None:
    command = render(deployment(device))
    argv = shlex.split(command.text)
    assert json.loads(after(argv, "--speculative-config")) == CONFIG
    assert argv == list(command.argv)


def test_jetson_sets_the_entrypoint_and_serves_once() -> None:
    argv = list(render(deployment("thor-t5000")).argv)
    assert after(argv, "--entrypoint") == "vllm"
    image = argv.index("vllm/vllm-openai:latest")
    assert argv[image + 1 : image + 3] == ["serve", "meta-llama/Llama-3.1-8B-Instruct"]
    assert argv.count("serve") == 1 and "--ipc" in argv and "HF_TOKEN" in argv


def test_older_orin_runs_the_nvidia_ai_iot_image() -> None:
    board = simulated_device("orin-agx-64gb", "36.4.3")
    text = render(Deployment(board, runtime_for(board), known("Qwen3-8B"), 4096)).text
    assert "ghcr.io/nvidia-ai-iot/vllm:latest-jetson-orin serve Qwen/Qwen3-8B" in text and "--ipc" not in text


def test_home_is_left_to_the_shell_and_nothing_else_is() -> None:
    assert shell_line(["-v", "$HOME/.cache/huggingface:/root/x"]) == '-v "$HOME/.cache/huggingface:/root/x"'
    assert shell_line(["$HOME/$(id)"]) == "'$HOME/$(id)'"
    assert shell_line(["a b", "it's"]) == "'a b' 'it'\"'\"'s'"


@given(st.lists(st.text(st.characters(exclude_characters="\0"), max_size=20), max_size=6))
def test_any_arguments_survive_the_shell(argv: list[str]) -> None:
    assert shlex.split(shell_line([a for a in argv if not a.startswith("$HOME/")])) == [
        a for a in argv if not a.startswith("$HOME/")
    ]


def test_a_model_path_with_spaces_is_mounted_and_quoted() -> None:
    board = simulated_device("thor-t5000")
    model = known("Qwen3-8B").model_copy(update={"id": "/my models/q", "path": "/my models/q"})
    command = render(Deployment(board, runtime_for(board), model, 4096))
    assert "/my models/q:/my models/q:ro" in shlex.split(command.text)


def test_cpu_vllm_is_started_as_a_module() -> None:
    argv = render(deployment("cpu", utilization=None)).argv
    assert argv[:4] == ("python", "-m", "vllm.entrypoints.openai.api_server", "--model")
    assert "--gpu-memory-utilization" not in argv and "--dtype" not in argv
    old = simulated_device("cpu").model_copy(update={"bf16": False})
    argv = render(deployment(old, utilization=None, runtime=runtime_for(old, "vllm"))).argv
    assert argv[argv.index("--dtype") + 1] == "float32"


@pytest.mark.parametrize(
    ("method", "algorithm"),
    [("eagle3", "EAGLE3"), ("draft_model", "STANDALONE"), ("mtp", "NEXTN")],
)
def test_sglang_wants_all_three_numbers(method: str, algorithm: str) -> None:
    argv = list(render(deployment("thor-t5000", "sglang", config={**CONFIG, "method": method})).argv)
    assert after(argv, "--speculative-algorithm") == algorithm
    numbers = [after(argv, f"--speculative-{n}") for n in ("num-steps", "eagle-topk", "num-draft-tokens")]
    assert numbers == ["5", "1", "6"]
    assert after(argv, "--mem-fraction-static") == "0.85" and "--enable-metrics" in argv


def test_sglang_block_drafters_take_their_block_from_the_head() -> None:
    argv = render(deployment("h100", "sglang", config={**CONFIG, "method": "dflash"})).argv
    assert "DFLASH" in argv and HEAD.id in argv and "--speculative-num-steps" not in argv


def test_sglang_ngram_has_no_draft_model() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 5}
    argv = render(deployment("h100", "sglang", config=config, drafter=Drafter(method="ngram"))).argv
    assert "--speculative-draft-model-path" not in argv and "NGRAM" in argv


def test_trtllm_yaml_and_its_shell_line() -> None:
    command = render(deployment("h100", "trtllm"))
    text = command.files["surespec-trtllm.yaml"]
    assert 'decoding_type: "Eagle3"' in text and "max_draft_len: 5" in text
    write, serve = command.text.split(" > surespec-trtllm.yaml && ")
    assert "\n".join(shlex.split(write)[2:]) + "\n" == text
    assert after(shlex.split(serve), "--config") == "surespec-trtllm.yaml"


def test_trtllm_schedule_ends_before_the_zero() -> None:
    config = {**CONFIG, "num_speculative_tokens_per_batch_size": [[1, 2, 5], [3, 7, 3], [8, 256, 0]]}
    text = render(deployment("h100", "trtllm", config=config)).files["surespec-trtllm.yaml"]
    assert "draft_len_schedule:\n    2: 5\n    7: 3\n" in text and "256" not in text


def test_llamacpp_new_and_old_names() -> None:
    config = {**CONFIG, "method": "draft_model"}
    draft = Drafter(method="draft_model", id="meta-llama/Llama-3.2-1B-Instruct")
    new = list(render(deployment("h100", "llamacpp", config=config, drafter=draft, utilization=None)).argv)
    assert after(new, "--spec-type") == "draft-simple" and after(new, "--spec-draft-n-max") == "5"
    old = list(render(deployment("h100", "llamacpp", config=config, drafter=draft, old_llamacpp_flags=True)).argv)
    assert after(old, "--draft-max") == "5" and "--spec-type" not in old
    assert after(new, "-md") == "Llama-3.2-1B-Instruct.gguf"


def test_llamacpp_says_how_to_convert_a_head() -> None:
    notes = render(deployment("h100", "llamacpp")).notes
    assert any("--target-model-dir meta-llama/Llama-3.1-8B-Instruct" in note for note in notes)


def test_dynamo_on_one_machine_needs_no_services() -> None:
    command = render(deployment("h100", "dynamo"))
    front, worker = command.text.splitlines()
    assert front.endswith("--discovery-backend file &") and "dynamo.frontend" in front
    assert worker.startswith("DYN_SYSTEM_PORT=8081 ")
    assert json.loads(after(shlex.split(worker), "--speculative-config")) == CONFIG
    assert "--enforce-eager" not in command.text


def test_dynamo_graph_is_yaml_with_the_same_json() -> None:
    yaml = pytest.importorskip("yaml")
    command = render(deployment("h100", "dynamo", kubernetes=True))
    graph = yaml.safe_load(command.files["surespec-dynamo.yaml"])
    assert (graph["apiVersion"], graph["kind"]) == ("nvidia.com/v1beta1", "DynamoGraphDeployment")
    front, worker = graph["spec"]["components"]
    main = worker["podTemplate"]["spec"]["containers"][0]
    assert (front["type"], worker["type"], main["name"]) == ("frontend", "worker", "main")
    assert json.loads(after(main["args"], "--speculative-config")) == CONFIG
    assert main["command"] == ["python3", "-m", "dynamo.vllm"]
    assert main["envFrom"] == [{"secretRef": {"name": "hf-token-secret"}}]


def test_dynamo_graph_text() -> None:
    text = render(deployment("h100", "dynamo", kubernetes=True)).files["surespec-dynamo.yaml"]
    line = next(line for line in text.splitlines() if "eagle3" in line)
    assert json.loads(json.loads(line.strip().removeprefix("- "))) == CONFIG


def test_local_uses_the_name_that_fetch_knows() -> None:
    cpu = simulated_device("cpu")
    text = render(Deployment(cpu, runtime_for(cpu), known("smollm2-135m"), 2048)).text
    assert text.startswith("surespec serve --model smollm2-135m ")


def test_baseline_has_no_speculation() -> None:
    for engine in ("vllm", "sglang", "trtllm", "llamacpp", "dynamo", "local"):
        command = render(deployment("h100", engine, config=None, drafter=None))
        text = command.text + "".join(command.files.values())
        assert "speculative" not in text and "--spec-" not in text


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=20)


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=8), v, max_size=3)
    )
)
def test_yaml_is_read_back(value: Any) -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(to_yaml(value)) == value


# --- versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.8.5.post1", (0, 8, 5)),
        ("v0.31.0-ubuntu2404", (0, 31, 0)),
        ("1.3.0rc29", (1, 3, 0)),
        ("0.33.0+cu130", (0, 33, 0)),
        ("latest", ()),
        ("", ()),
        ("9" * 5000, ()),
    ],
)
def test_release(text: str, expected: tuple[int, ...]) -> None:
    assert release(text) == expected


def test_comparisons() -> None:
    assert at_least("0.20", "0.20.0") and not at_least("0.9.2", "0.10") and not at_least("latest", "0.1")
    assert at_most("0.16.2", "0.16") and not at_most("0.17.0", "0.16") and at_least("0.1", "")


MATRIX = [  # field or method, version, known there?
    ("disable_by_batch_size", "0.16.0", True),
    ("disable_by_batch_size", "0.17.0", False),
    ("parallel_drafting", "0.15.0", False),
    ("parallel_drafting", "0.16.0", True),
    ("acceptance_method", "0.9.1", True),
    ("acceptance_method", "0.10.0", False),
    ("speculative_token_tree", "0.20.1", True),
    ("speculative_token_tree", "0.21.0", False),
    ("rejection_sample_method", "0.17.0", False),
    ("attention_backend", "0.21.0", True),
    ("attention_backend", "0.20.2", False),
    ("num_speculative_tokens_per_batch_size", "0.23.0", False),
    ("num_speculative_tokens_per_batch_size", "0.24.0", True),
    ("kv_cache_dtype", "0.25.1", False),
    ("kv_cache_dtype", "0.26.0", True),
    ("fly_window_size", "0.32.0", False),
    ("draft_lm_head_quantization", "0.33.0", True),
    ("num_speculative_tokens", "0.8.5", True),
]


@pytest.mark.parametrize(("name", "version", "expected"), MATRIX)
def test_fields_by_version(name: str, version: str, expected: bool) -> None:
    assert (field_problem(name, version) == "") is expected


@pytest.mark.parametrize(
    ("method", "version", "expected"),
    [
        ("eagle3", "0.9.0", False),
        ("eagle3", "0.9.1", True),
        ("draft_model", "0.9.2", True),
        ("draft_model", "0.10.0", False),
        ("draft_model", "0.14.1", False),
        ("draft_model", "0.15.0", True),
        ("medusa", "0.32.0", True),
        ("medusa", "0.33.0", False),
        ("dflash", "0.19.0", False),
        ("dspark", "0.25.0", True),
        ("mtp", "0.10.2", False),
        ("ngram", "0.8.5.post1", True),
    ],
)
def test_methods_by_version(method: str, version: str, expected: bool) -> None:
    assert (method_problem(method, version) == "") is expected


def test_gate_leaves_out_and_says_from_when() -> None:
    wanted = {**CONFIG, "num_speculative_tokens_per_batch_size": [[1, 4, 5]]}
    gated = gate(wanted, "0.20.1")
    assert gated.config == CONFIG
    assert gated.dropped == (("num_speculative_tokens_per_batch_size", "needs vLLM 0.24 or newer"),)
    assert gate(wanted, "0.24.0").config == wanted
    assert gate(wanted, "").config == wanted


def test_an_unknown_field_is_a_problem_at_any_version() -> None:
    assert field_problem("num_speculative_tokrns", "") and field_problem("num_speculative_tokrns", "0.33.0")


def test_dynamos_quick_start_is_complete_and_holds_no_token(capsys):
    from surespec.planning import PlanRequest, make_plan

    plan = make_plan(
        PlanRequest(model="meta-llama/Llama-3.1-8B-Instruct", device="rtx-4090", engine="dynamo", offline=True)
    )
    text = "\n".join(step.text for step in plan.guide)
    for part in ("etcd", "nats", "docker run", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "dynamo.frontend", "dynamo.vllm",
                 '"method":"eagle3"', "/v1/chat/completions", "/health", "surespec tune"):  # fmt: skip
        assert part in text, part
    assert "HF_TOKEN=hf_" not in text
    other = make_plan(
        PlanRequest(model="meta-llama/Llama-3.1-8B-Instruct", device="rtx-4090", engine="vllm", offline=True)
    )
    assert other.guide == ()
