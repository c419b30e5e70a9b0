"""The commands probe, plan and explain: output, JSON, exit codes."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from surespec.cli_plan import explain_command, parse_concurrency, plan_command, probe_command
from surespec.errors import UsageError

BOARDS = Path(__file__).parents[1] / "data" / "plan" / "boards"
app = typer.Typer()
app.command("plan")(plan_command)
app.command("probe")(probe_command)
app.command("explain")(explain_command)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def document(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, text = run(*arguments, "--json")
    return code, json.loads(text)


def test_plan_json_has_the_contracts_fields() -> None:
    code, got = document("plan", "--model", "Llama-3.1-8B", "--device", "thor-t5000")
    assert code == 0 and got["schema"] == "surespec/plan/1"
    assert got["device"]["sku"] == "thor-t5000" and got["device"]["memory_gb"] == 128
    assert got["model"]["kv_bytes_per_token"] == 131072
    wanted = {
        "name", "method", "num_speculative_tokens", "speculative_config", "gpu_memory_utilization", "fits",
        "margin_gib", "rules", "command",
    }  # fmt: skip
    assert wanted <= set(got["arms"][0])
    assert isinstance(got["refused"], list) and isinstance(got["notes"], list)


def test_plan_without_an_arm_exits_10() -> None:
    code, got = document("plan", "--model", "Qwen3-8B", "--device", "orin-nano-8gb")
    assert code == 10 and got["arms"] == []
    assert {"method", "rule", "why", "instead"} <= set(got["refused"][0])


def test_plan_for_people() -> None:
    code, text = run("plan", "--model", "Llama-3.1-8B", "--device", "thor-t5000")
    assert code == 0 and "eagle3-k5" in text and "--entrypoint vllm" in text
    code, text = run("plan", "--model", "Qwen3-8B", "--device", "orin-nano-8gb")
    assert code == 10 and "refused eagle3 by W4" in text and "keep the deployment as it is" in text


def test_a_plan_whose_arms_need_changes_points_at_them() -> None:
    wanted = ("--model", "Llama-3.1-8B", "--device", "orin-agx-32gb", "--max-model-len", "32768")
    code, text = run("plan", *wanted, "--gpu-memory-utilization", "0.60")
    assert code == 10 and "to fit: --gpu-memory-utilization" in text
    assert 'make the changes under "to fit"' in text and "keep the deployment as it is" not in text


def test_plan_on_a_captured_board() -> None:
    code, got = document("plan", "--model", "Qwen3-8B", "--root", str(BOARDS / "thor-t4000"))
    assert code == 0 and any("70W" in note for note in got["notes"])


def test_plan_needs_a_model() -> None:
    with pytest.raises(UsageError, match="no model"):
        run("plan", "--device", "thor-t5000")


@pytest.mark.parametrize("engine", ["vlm", "dynamo-foo"])
def test_unknown_engine(engine: str) -> None:
    with pytest.raises(UsageError, match="no such engine"):
        run("plan", "--model", "Qwen3-8B", "--device", "h100", "--engine", engine)


def test_version_must_be_one() -> None:
    with pytest.raises(UsageError, match="not a version"):
        run("plan", "--model", "Qwen3-8B", "--device", "h100", "--engine-version", "newest")


def test_dynamo_graph() -> None:
    _, got = document("plan", "--model", "Llama-3.1-8B", "--device", "h100", "--engine", "dynamo", "--kubernetes")
    assert "DynamoGraphDeployment" in got["arms"][0]["files"]["surespec-dynamo.yaml"]


@pytest.mark.parametrize(("text", "expected"), [("1", (1,)), ("1,8", (1, 8)), ("8,8", (8,))])
def test_concurrency(text: str, expected: tuple[int, ...]) -> None:
    assert parse_concurrency(text) == expected


@pytest.mark.parametrize("text", ["", "a", "0", "1,,8", "99999"])
def test_bad_concurrency(text: str) -> None:
    with pytest.raises(UsageError, match="--concurrency"):
        parse_concurrency(text)


def test_probe_json() -> None:
    code, got = document("probe", "--device", "orin-agx-64gb", "--l4t", "36.4.3", "--model", "Qwen3-8B")
    assert code == 0 and got["schema"] == "surespec/probe/1"
    assert got["device"]["jetpack"] == "6.2" and got["model"]["num_layers"] == 36 and got["engines"] == {}


def test_probe_for_people() -> None:
    code, text = run("probe", "--root", str(BOARDS / "orin-agx-32gb"))
    assert code == 0 and "L4T 39.2.0" in text and "MODE_30W" in text


def test_probe_of_this_machine() -> None:
    code, got = document("probe")
    assert code == 0 and got["device"]["simulated"] is False and "local" in got["engines"]


def test_explain() -> None:
    code, text = run("explain", "c5")
    assert code == 0 and text.startswith("C5: ") and "source: S1" in text and "but:" in text
    _, got = document("explain", "W4")
    assert got["schema"] == "surespec/rule/1" and got["source"].startswith("S1")
    _, listed = document("explain")
    assert len(listed["rules"]) > 50


def test_a_brought_head_by_flag(tmp_path: Path) -> None:
    head = {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": 576,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
        "draft_vocab_size": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(head))
    common = ("plan", "--device", "cpu", "--engine", "local", "--drafter", str(tmp_path))
    code, got = document(*common, "--model", "smollm2-135m")
    assert code == 0 and got["arms"][0]["speculative_config"]["model"] == str(tmp_path)
    code, got = document(*common, "--model", "Qwen3-0.6B")
    assert code == 10 and got["refused"][0]["rule"] == "H3"


def test_an_installed_engine_gives_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surespec.planning.installed_engines", lambda: {"vllm": "0.31.0"})
    _, got = document("plan", "--model", "smollm2-135m", "--engine", "vllm")
    assert got["runtime"]["version"] == "0.31.0" and not any("V4" in note for note in got["notes"])


def test_a_running_server_is_taken_as_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    from surespec.probe import Endpoint

    server = Endpoint(
        url="http://x", engine="vllm", version="0.24.0", model="Qwen/Qwen3-8B", max_model_len=4096, speculating=True
    )
    monkeypatch.setattr("surespec.planning.probe_endpoint", lambda _: server)
    _, got = document("plan", "--endpoint", "http://x", "--root", str(BOARDS / "orin-agx-64gb"), "--l4t", "39.2")
    assert got["model"]["id"] == "Qwen/Qwen3-8B" and got["max_model_len"] == 4096
    arm = got["arms"][0]
    assert arm["gpu_memory_utilization"] == got["gpu_memory_utilization"]  # C5: it speculates already
    assert any("speculates already" in note for note in arm["notes"])


def test_a_recipe_fills_what_was_not_said(tmp_path: Path) -> None:
    recipe = tmp_path / "run.sh"
    line = (
        "docker run vllm/vllm-openai:v0.27.1 --model Qwen/Qwen3-8B --gpu-memory-utilization 0.60 --max-model-len 4096"
    )
    recipe.write_text(line)
    _, got = document("plan", "--recipe", str(recipe), "--device", "thor-t5000", "--max-model-len", "2048")
    arm = got["arms"][0]
    assert (got["runtime"]["version"], got["max_model_len"], got["gpu_memory_utilization"]) == ("0.27.1", 2048, 0.60)
    assert arm["gpu_memory_utilization"] == 0.55 and "vllm/vllm-openai:v0.27.1" in arm["command"]
    assert got["recipe"]["diagnoses"] == []
    recipe.write_text(f"""{line} --speculative-config '{{"method":"ngram","num_speculative_tokens":3}}'""")
    _, got = document("plan", "--recipe", str(recipe), "--device", "thor-t5000")
    assert got["arms"][0]["gpu_memory_utilization"] == 0.60


@pytest.mark.parametrize(
    ("text", "old"), [("--draft-max N", True), ("--spec-type T --spec-draft-n-max", False), ("", False)]
)
def test_llama_server_is_asked_which_flags_it_has(tmp_path: Path, text: str, old: bool) -> None:
    from surespec.probe import llamacpp_has_old_flags

    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o755)
    assert llamacpp_has_old_flags(str(program)) is old
    assert llamacpp_has_old_flags(str(tmp_path / "missing")) is False


def test_planning_from_bundled_facts_opens_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for model in ("Llama-3.1-8B", "gpt-oss-20b", "nvidia/Llama-3.3-70B-Instruct-FP4"):
        code, _ = document("plan", "--model", model, "--device", "thor-t5000")
        assert code == 0


DOUBLED = """docker run --rm -it --runtime nvidia --network host vllm/vllm-openai:v0.27.1 \\
  vllm serve Qwen/Qwen3-8B --max-model-len 8192 --gpu-memory-utilization 0.80
"""


def test_a_real_recipe_is_planned_and_shown(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(DOUBLED)
    code, got = document("plan", "--recipe", str(file), "--device", "thor-t5000")
    assert code == 0 and got["runtime"]["version"] == "0.27.1"
    assert (got["gpu_memory_utilization"], got["arms"][0]["gpu_memory_utilization"]) == (0.80, 0.75)
    code, text = run("probe", "--recipe", str(file), "--device", "thor-t5000")
    assert code == 0 and "vllm 0.27.1" in text and "not speculating" in text
    _, probed = document("probe", "--recipe", str(file), "--device", "thor-t5000")
    assert probed["recipe"]["model"] == "Qwen/Qwen3-8B"


def test_a_recipe_from_a_pipe_is_read_once(tmp_path: Path) -> None:
    """As the shell's ``<(...)`` gives it: a second reading would find nothing."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("vllm serve Qwen/Qwen3-8B\n",), daemon=True)
    writer.start()
    _, got = document("plan", "--recipe", str(pipe), "--device", "thor-t5000")
    assert got["recipe"]["model"] == got["model"]["id"] == "Qwen/Qwen3-8B"
    writer.join(timeout=5)
