"""What people break, and what they are told: one clear sentence with file, line and what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from surespec.errors import ConfigError, InputFileError, UsageError
from surespec.recipe import Recipe, patch_recipe, read_recipe, read_text
from surespec.recipe.text import Source

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


def read(text: str, name: str = "run.sh", service: str | None = None) -> Recipe:
    return read_text(Path(name), Source.decode(name, text.encode()), service=service)


def patched(text: str, config: dict[str, Any] | None = NGRAM, name: str = "run.sh", **more: Any) -> str:
    return patch_recipe(read(text, name), config, **more).text


SERVE = "vllm serve Qwen/Qwen3-8B "
BROKEN_JSON = {
    "quoted-json": """--speculative-config "'{\\"method\\":\\"ngram\\",\\"num_speculative_tokens\\":4}'" """,
    "escaped-json": """--speculative-config '{\\"method\\":\\"ngram\\",\\"num_speculative_tokens\\":4}'""",
    "doubled-braces": """--speculative-config '{{"method":"ngram","num_speculative_tokens":4}}'""",
    "lost-quotes": """--speculative-config {"method":"ngram","num_speculative_tokens":4}""",
    "python-json": """--speculative-config "{'method': 'ngram', 'num_speculative_tokens': 4}" """,
    "curly-quotes": """--speculative-config '{“method”:“ngram”,“num_speculative_tokens”:4}'""",
    "wrong-flag": """--additional-config '{"method":"ngram","num_speculative_tokens":4}'""",
}


@pytest.mark.parametrize("fault", BROKEN_JSON)
def test_broken_json_is_named_understood_and_written_anew(fault: str) -> None:
    found = read(f"{SERVE}{BROKEN_JSON[fault]} --port 8001\n")
    assert [d.name for d in found.diagnoses] == [fault]
    assert found.speculative_config == {"method": "ngram", "num_speculative_tokens": 4}
    text = patch_recipe(found, found.speculative_config).text
    after = read(text)
    assert after.speculative_config == found.speculative_config
    assert not after.diagnoses
    assert "--port 8001" in text


def test_json_of_another_flag_inside_a_wrapper_key_moves() -> None:
    text = SERVE + """--additional-config '{"speculative_config":{"method":"ngram","num_speculative_tokens":2}}'\n"""
    assert read(text).speculative_config == {"method": "ngram", "num_speculative_tokens": 2}
    assert "--additional-config" not in patched(text)


def test_unrelated_json_flags_are_left_alone() -> None:
    text = SERVE + """--override-generation-config '{"temperature": 0.2}' --compilation-config '{"level": 3}'\n"""
    assert not read(text).diagnoses
    assert "'{\"temperature\": 0.2}'" in patched(text)


@pytest.mark.parametrize(
    ("json_text", "fault", "fix"),
    [
        ('{"method":"ngram","num_speculative_tokrns":4}', "unknown-key", "num_speculative_tokens"),
        ('{"method":"ngram","prompt_lookup_mx":4,"num_speculative_tokens":4}', "unknown-key", "prompt_lookup_max"),
        ('{"method":"eagle-3","model":"x","num_speculative_tokens":4}', "unknown-method", "eagle3"),
        ('{"method":"ngram","num_speculative_tokens":"4"}', "bad-k", "without quotes"),
        ('{"method":"ngram","num_speculative_tokens":0}', "bad-k", "from 1 on"),
        ('["ngram", 4]', "not-json", ""),
        ('{"method": "ngram" "num_speculative_tokens": 4}', "not-json", ""),
        ("", "not-json", ""),
    ],
)
def test_wrong_content_is_named_with_what_was_meant(json_text: str, fault: str, fix: str) -> None:
    found = read(f"{SERVE}--speculative-config '{json_text}'\n")
    assert [d.name for d in found.diagnoses] == [fault]
    assert found.diagnoses[0].line == 1
    assert fix in found.diagnoses[0].fix
    assert read(patch_recipe(found, NGRAM).text).speculative_config == NGRAM


def test_a_field_too_new_or_removed_for_the_image_is_named() -> None:
    docker = "docker run vllm/vllm-openai:v0.20.0 Qwen/Qwen3-8B --speculative-config "
    new = read(docker + '\'{"method":"ngram","num_speculative_tokens":4,"kv_cache_dtype":"fp8"}\'\n')
    assert "needs vLLM 0.26" in new.diagnoses[0].sentence
    old = read(docker + '\'{"method":"ngram","num_speculative_tokens":4,"disable_by_batch_size":8}\'\n')
    assert "removed" in old.diagnoses[0].sentence


def test_a_config_the_engine_would_refuse_is_not_written() -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokns"):
        patched(SERVE + "\n", {"method": "ngram", "num_speculative_tokns": 4})


def test_given_twice_the_last_counts_and_one_stays() -> None:
    text = (
        SERVE
        + """-sc '{"method":"ngram","num_speculative_tokens":2}' --port 1 --speculative_config='{"method":"ngram"}'\n"""
    )
    assert read(text).diagnoses[0].name == "twice"
    after = patched(text)
    assert after.count("ngram") == 1
    assert read(after).speculative_config == NGRAM


def assert_sentence(error: UsageError, line: int, *words: str) -> None:
    """File and line, one sentence, and a hint."""
    assert re.match(rf"\S+, line {line}: ", error.message), error.message
    assert error.message.endswith(".")
    assert error.hint
    for word in words:
        assert word in str(error)


MALFORMED = {
    "unbalanced quote": (
        "run.sh", SERVE + "\\\n  --speculative-config '{\"method\":\"ngram\"} --port 8000\n", 2, ("single quote",)
    ),
    "two services": (
        "compose.yaml",
        "services:\n  a:\n    image: vllm/vllm-openai:v0.27.1\n    command: [--model, A/a]\n"
        "  b:\n    image: vllm/vllm-openai:v0.27.1\n    command: [--model, B/b]\n",
        7, ("a (line 4)", "b (line 7)", "--service"),
    ),
    "multi-document": (
        "k8s.yaml",
        "".join(
            f"apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: {n}}}\nspec:\n  template:\n    spec:\n"
            f"      containers:\n      - name: c\n"
            f"        image: vllm/vllm-openai:v0.27.1\n        args: [--model, {n}]\n---\n"
            for n in ("one", "two")
        ),
        21, ("one", "two", "--service"),
    ),
    "here-document": (
        "run.sh", f"#!/bin/bash\ncat > start.sh <<EOF\n{SERVE}\nEOF\nbash start.sh\n", 3, ("here-document",)
    ),
    "unknown image": (
        "run.sh", "docker run \\\n  registry.example/llm/server:2 --model A/a\n", 2, ("llm/server:2", "--entrypoint")
    ),
    "unknown image in YAML": (
        "compose.yml", "services:\n  x:\n    image: example/llm:2\n    command: --model A/a\n", 3, ("example/llm:2",)
    ),
    "no YAML": ("compose.yaml", "services:\n  x: [1,\n", 3, ("YAML",)),
    "another YAML": ("values.yaml", "image: x\nreplicas: 1\n", 1, ("compose",)),
    "no server": ("run.sh", "echo hello\n", 1, ("vllm serve",)),
    "unclosed unit quote": ("x.service", "[Service]\nExecStart=vllm serve A/a --x 'y\n", 2, ("single quote",)),
    "unclosed here-document": ("run.sh", "cat <<EOF\nabc\n", 1, ("EOF",)),
    "unclosed array": ("run.sh", "X=(\n  --a\n", 1, ("array",)),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_recipes_give_one_clear_sentence(case: str) -> None:
    name, text, line, words = MALFORMED[case]
    with pytest.raises(InputFileError) as error:
        read(text, name)
    assert_sentence(error.value, line, *words)


UNPATCHABLE = {
    "computed": ("run.sh", SERVE + '\\\n  --speculative-config "$(jq -c . spec.json)"\n', 2),
    "anchor": (
        "compose.yaml",
        "x-args: &args\n  - --model\n  - A/a\nservices:\n  a:\n"
        "    image: vllm/vllm-openai:v0.27.1\n    command: *args\n",
        2,
    ),
    "merged service": (
        "compose.yaml",
        "x-vllm: &vllm\n  image: vllm/vllm-openai:v0.27.1\n  command: [--model, A/a]\nservices:\n  a:\n    <<: *vllm\n",
        3,
    ),
    "options file": ("run.sh", "trtllm-serve A/a --config options.yaml\n", 1),
    "program for the entry point": (
        "compose.yaml",
        "services:\n  a:\n    image: vllm/vllm-openai:v0.27.1\n    command: [bash, -c, vllm serve A/a]\n",
        4,
    ),
}


@pytest.mark.parametrize("case", UNPATCHABLE)
def test_what_cannot_be_patched_safely_is_said_with_the_flag_to_add(case: str) -> None:
    name, text, line = UNPATCHABLE[case]
    found = read(text, name)
    with pytest.raises(InputFileError) as error:
        patch_recipe(found, NGRAM)
    assert re.match(rf"\S+, line {line}: ", error.value.message), error.value.message
    assert "speculative" in error.value.hint


@pytest.mark.parametrize(
    ("text", "fault", "word"),
    [
        ("docker run vllm/vllm-openai:latest --port 8000\n", "no-model", "--model"),
        ('vllm serve "$MODEL" --port 8000\n', "model-unknown", "$MODEL"),
        ("vllm serve $1 --port 8000\n", "model-unknown", "$1"),
        ("vllm serve A/a \\\r\n  --port 8000\r\n", "windows-line-ends", "sed"),
        ("vllm serve A/a --port 8000 \\ \n  --max-model-len 8192\n", "broken-continuation", "blank"),
        ("vllm serve A/a --port 8000 \\\n  # context\n  --max-model-len 8192\n", "comment-in-command", "comment"),
    ],
)
def test_what_is_wrong_but_readable_is_diagnosed(text: str, fault: str, word: str) -> None:
    found = read(text)
    assert [d.name for d in found.diagnoses] == [fault]
    assert word in str(found.diagnoses[0])
    assert found.diagnoses[0].line >= 1


def test_windows_line_ends_stay() -> None:
    text = "vllm serve A/a \\\r\n  --port 8000\r\n"
    after = patched(text)
    assert after.count("\r\n") == after.count("\n") == 3
    assert read(after).speculative_config == NGRAM


def test_a_service_is_picked_by_name_or_line_and_only_it_changes() -> None:
    name, text, _, _ = MALFORMED["two services"]
    by_name = patch_recipe(read(text, name, service="b"), NGRAM)
    assert by_name.text == patch_recipe(read(text, name, service="7"), NGRAM).text
    assert by_name.text.splitlines()[:6] == text.splitlines()[:6]
    with pytest.raises(UsageError, match="no service c"):
        read(text, name, service="c")


def test_prefill_and_decode_workers_are_told_apart_by_line() -> None:
    text = "python3 -m dynamo.vllm --model A/a &\npython3 -m dynamo.vllm --model A/a --is-prefill-worker &\n"
    with pytest.raises(InputFileError, match="2 servers"):
        read(text)
    after = patch_recipe(read(text, service="1"), NGRAM).text.splitlines()
    assert "--speculative-config" in after[0]
    assert after[1] == text.splitlines()[1]


def test_utilization_is_lowered_once_and_never_added() -> None:
    first = patch_recipe(read(SERVE + "--gpu-memory-utilization 0.85\n"), NGRAM)
    assert "--gpu-memory-utilization 0.80" in first.text
    assert any(n.startswith("C5") for n in first.notes)
    assert "--gpu-memory-utilization 0.80" in patched(first.text, {**NGRAM, "num_speculative_tokens": 2})
    assert "utilization" not in patched(SERVE + "\n")
    assert "--gpu-memory-utilization 0.70" in patched(first.text, gpu_memory_utilization=0.7)
    assert "--gpu-memory-utilization 0.85" in patched(first.text, gpu_memory_utilization=0.85)


def test_other_flags_are_added_or_changed() -> None:
    after = patched(SERVE + "--max-num-seqs 4\n", other_flags={"--max-num-seqs": "8", "--async-scheduling": None})
    assert read(after).flags == {
        "--max-num-seqs": "8",
        "--async-scheduling": None,
        "--speculative-config": '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4}',
    }


def test_secrets_are_not_shown() -> None:
    found = read(SERVE + "--api-key sk-123 --hf-token hf_456\n")
    assert "sk-123" not in repr(found.flags)
    assert "hf_456" not in str(found.document())


def test_a_variable_two_commands_use_is_not_changed_for_one() -> None:
    text = (
        "UTIL=0.9\nvllm serve A/a --gpu-memory-utilization $UTIL --port 1 &\n"
        "vllm serve B/b --gpu-memory-utilization $UTIL\n"
    )
    after = patch_recipe(read(text, service="A/a"), NGRAM).text
    assert after.startswith("UTIL=0.9\n")
    assert "serve A/a --gpu-memory-utilization 0.85" in after
    assert "serve B/b --gpu-memory-utilization $UTIL" in after


def test_a_flag_whose_value_is_unknown_keeps_it() -> None:
    after = patched("vllm serve A/a --max-model-len $CONTEXT_ARGS\n")
    assert "--max-model-len $CONTEXT_ARGS --speculative-config" in after


def test_binary_and_missing_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_bytes(b"\x7fELF\0\0")
    with pytest.raises(InputFileError, match="no text file"):
        read_recipe(tmp_path / "x.sh")
    with pytest.raises(InputFileError, match="cannot be read"):
        read_recipe(tmp_path / "none.sh")


def test_a_file_of_flags_is_named() -> None:
    found = read("vllm serve A/a --config vllm.yaml\n")
    assert [d.name for d in found.diagnoses] == ["config-file"]
    assert "vllm.yaml" in found.diagnoses[0].sentence


def test_a_lowest_utilization_is_not_lowered() -> None:
    found = patch_recipe(read(SERVE + "--gpu-memory-utilization 0.05\n"), NGRAM)
    assert "--gpu-memory-utilization 0.05 " in found.text
    assert not found.notes


def test_brackets_without_end_are_no_recipe(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text("services: " + "[" * 2000)
    with pytest.raises(InputFileError, match="nested too deeply"):
        read_recipe(path)


def test_a_flag_without_its_value_is_not_patched(tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    path.write_text("llama-server -m model.gguf --draft-max 16 -md && echo\n")
    with pytest.raises(InputFileError, match="without its value"):
        patch_recipe(read_recipe(path), {"method": "draft_model", "model": "x.gguf", "num_speculative_tokens": 2})
