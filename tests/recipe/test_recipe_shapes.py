"""Shapes of recipes beyond the golden ones: where the words come from, and where a change is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surespec.errors import InputFileError
from surespec.recipe import Recipe, patch_recipe, read_recipe, read_text
from surespec.recipe.text import Source

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
FLAG = """--speculative-config '{"method":"ngram","num_speculative_tokens":4}'"""


def read(text: str, name: str = "run.sh", service: str | None = None) -> Recipe:
    return read_text(Path(name), Source.decode(name, text.encode()), service=service)


def patched(text: str, name: str = "run.sh", config: dict[str, Any] | None = NGRAM, **more: Any) -> str:
    found = patch_recipe(read(text, name), config, **more)
    assert read(found.text, name).speculative_config == config
    return found.text


def test_the_whole_command_in_an_array() -> None:
    text = (
        'PORT="${PORT:-8123}"\ncmd=(\n    vllm serve "$1"\n    --port "$PORT"\n)\n'
        '[[ -n "$X" ]] && cmd+=(--x "$X")\nprintf "%q " "${cmd[@]}"\n"${cmd[@]}"\n'
    )
    found = read(text)
    assert (found.engine, found.port, found.model) == ("vllm", 8123, "")
    assert f'    --port "$PORT"\n    {FLAG}\n)' in patched(text)


def test_a_program_array_and_the_guarded_expansion() -> None:
    text = 'SERVE=(vllm serve)\nEXTRA=(--dtype auto)\nexec "${SERVE[@]}" A/a --port 1 ${EXTRA[@]+"${EXTRA[@]}"}\n'
    assert read(text).dtype == "auto"
    assert f"EXTRA=(--dtype auto {FLAG})" in patched(text)


def test_a_container_program_in_a_variable() -> None:
    text = '${CONTAINER_CMD} run --rm --gpus "$G" ${PODMAN_EXTRA} -p "${PORT:-8123}:8000" '
    text += "vllm/vllm-openai:v0.27.1 A/a --port 8000 2>&1 | tee log\n"
    found = read(text)
    assert (found.kind, found.image, found.port) == ("docker", "vllm/vllm-openai:v0.27.1", 8123)
    assert f"--port 8000 {FLAG} 2>&1 | tee log" in patched(text)


@pytest.mark.parametrize("shell", ["bash -c", "bash -lc", "bash -c -i", "sh -ec", "/bin/bash -l -c"])
def test_a_shell_in_a_container_of_several_lines(shell: str) -> None:
    text = (
        f'docker run nvcr.io/nvidia/vllm:26.05-py3 \\\n  {shell} "vllm serve A/a \\\n'
        f'    --port 8000 \\\n    --max-model-len 8192"\n'
    )
    after = patched(text)
    assert "    --max-model-len 8192 \\\n    --speculative-config" in after
    assert after.endswith("}'\"\n")


def test_single_quoted_shell_text() -> None:
    after = patched("docker run nvcr.io/nvidia/vllm:26.05-py3 bash -c 'vllm serve A/a --port 1'\n")
    assert after.count("'") > 4


def test_container_variables_reach_the_shell_inside() -> None:
    text = "docker run -e MODEL=A/a --env LEN=4096 -e HF_TOKEN nvcr.io/nvidia/vllm:26.05-py3 "
    text += "sh -c 'vllm serve $MODEL --max-model-len ${LEN}'\n"
    found = read(text)
    assert (found.model, found.max_model_len, found.env) == ("A/a", 4096, ("MODEL", "LEN", "HF_TOKEN"))


def test_functions_and_conditions() -> None:
    text = (
        'serve() {\n  local model="${1:-A/a}"\n  if true; then\n    vllm serve "$model" \\\n'
        '      --port 8000\n  fi\n}\nserve "$@"\n'
    )
    assert read(text).model == "A/a"
    assert f"      --port 8000 \\\n      {FLAG}\n  fi" in patched(text)


def test_speculation_under_a_condition_is_changed_there_and_said() -> None:
    text = (
        'ARGS=(--port 1)\nif [ -n "$S" ]; then\n'
        '  ARGS+=(-sc \'{"method":"ngram","num_speculative_tokens":2}\')\nfi\n'
        'vllm serve A/a "${ARGS[@]}"\n'
    )
    found = patch_recipe(read(text), NGRAM)
    assert '"num_speculative_tokens":4}' in found.text
    assert any("condition" in note for note in found.notes)


def test_what_is_passed_on_may_come_after_and_is_said() -> None:
    found = patch_recipe(read('vllm serve A/a --port 1 "$@"\n'), NGRAM)
    assert found.text == f'vllm serve A/a --port 1 {FLAG} "$@"\n'
    assert any('"$@"' in note for note in found.notes)


def test_variables_that_nothing_sets_inside_the_json_are_replaced_and_said() -> None:
    text = 'vllm serve A/a -sc "{\\"method\\":\\"ngram\\",\\"num_speculative_tokens\\":$K}"\n'
    assert read(text).speculative_config == {"method": "ngram", "num_speculative_tokens": "$K"}
    found = patch_recipe(read(text), NGRAM)
    assert any("$K" in note for note in found.notes)
    assert read(found.text).speculative_config == NGRAM


def test_only_the_changed_key_of_a_json_over_several_lines_changes() -> None:
    text = (
        'vllm serve A/a --speculative-config \'{\n    "num_speculative_tokens": 2,\n'
        '    "method": "ngram"\n  }\' --port 1\n'
    )
    assert patched(text) == text.replace(": 2", ": 4")


def test_a_lost_flag_is_diagnosed_and_not_patched_over() -> None:
    text = "vllm serve A/a --port 8000\n  --max-model-len 8192 \\\n  --dtype auto\n"
    assert [d.name for d in read(text).diagnoses] == ["lost-flags"]
    with pytest.raises(InputFileError, match="line 2"):
        patch_recipe(read(text), NGRAM)


def test_comments_apostrophes_and_heredocs_around_do_not_matter() -> None:
    text = (
        "# it's here\ncat <<'EOF'\n don't \"mind\nEOF\ncat <<< \"x\" >/dev/null\n"
        "x=$((1+2)); y=`date`\nvllm serve A/a # don't\n"
    )
    assert patched(text) == text.replace("A/a #", f"A/a {FLAG} #")


@pytest.mark.parametrize(
    "line",
    [
        "uv run vllm serve A/a",
        "numactl -N 0 vllm serve A/a",
        "sudo -E env X=1 vllm serve A/a",
        "python3 -u -m vllm.entrypoints.openai.api_server --model A/a",
        "/opt/venv/bin/python -m vllm.entrypoints.cli.main serve A/a",
        "until vllm serve A/a; do sleep 1; done",
        "tmux new -d 'x'; vllm serve A/a",
        "docker exec -it box vllm serve A/a",
        "jetson-containers run $(autotag vllm) vllm serve A/a",
        "podman run --device nvidia.com/gpu=all docker.io/vllm/vllm-openai:v0.27.1 --model A/a",
        "docker run -itd -p8000:8000 -eX=1 --gpus=all vllm/vllm-openai:v0.27.1 --model=A/a",
        "docker run vllm/vllm-openai@sha256:abc --model A/a",
        "srun --gres=gpu:1 vllm serve A/a",
    ],
)
def test_ways_to_start_vllm(line: str) -> None:
    assert (read(line + "\n").engine, read(line + "\n").model) == ("vllm", "A/a")
    assert "--speculative-config" in patched(line + "\n")


@pytest.mark.parametrize(
    ("line", "engine", "model"),
    [
        ("python -m sglang.launch_server --model A/a", "sglang", "A/a"),
        ("sglang serve --model-path A/a", "sglang", "A/a"),
        ("trtllm-serve serve A/a --tp_size 2", "trtllm", "A/a"),
        ("llama-server -hf ggml-org/gemma-3-1b-it-GGUF", "llamacpp", "ggml-org/gemma-3-1b-it-GGUF"),
        ("python3 -m dynamo.sglang --model-path A/a", "dynamo-sglang", "A/a"),
        ("python3 -m dynamo.trtllm --model-path A/a", "dynamo-trtllm", "A/a"),
    ],
)
def test_ways_to_start_other_engines(line: str, engine: str, model: str) -> None:
    assert (read(line + "\n").engine, read(line + "\n").model) == (engine, model)


def test_talk_about_a_server_is_no_server() -> None:
    assert read('echo "vllm serve B/b"\npkill -f "vllm serve"\nvllm serve A/a\n').model == "A/a"


def test_llama_cpp_flags_change_in_place_and_keep_the_drafters_tuning() -> None:
    text = "llama-server -m t.gguf --spec-type draft-simple -md d.gguf -ngld 99 --spec-draft-n-max 8 --port 1\n"
    config = {"method": "draft_model", "model": "d.gguf", "num_speculative_tokens": 4}
    found = patch_recipe(read(text), config)
    assert found.text == text.replace("n-max 8", "n-max 4")
    ngram = patch_recipe(read(text), {"method": "ngram", "num_speculative_tokens": 4}).text
    assert "d.gguf" not in ngram
    assert "--spec-type ngram-simple" in ngram


def test_tensorrt_llm_speculation_is_read_from_its_options_file(tmp_path: Path) -> None:
    (tmp_path / "o.yaml").write_text(
        "speculative_config: {decoding_type: Eagle3, max_draft_len: 4, speculative_model: h/h}\n"
    )
    (tmp_path / "run.sh").write_text("trtllm-serve A/a --extra_llm_api_options o.yaml\n")
    found = read_recipe(tmp_path / "run.sh")
    assert found.speculates
    assert found.speculative_config == {"method": "eagle3", "model": "h/h", "num_speculative_tokens": 4}


COMPOSE = "services:\n  a:\n    image: vllm/vllm-openai:v0.27.1\n"


def test_compose_values_from_dotenv_are_read_and_never_written(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text('# here\nMODEL=\'A/a\'\nUTIL=0.9 # high\nSPEC={"method":"ngram"}\n')
    path = tmp_path / "compose.yaml"
    path.write_text(COMPOSE + "    command: --model ${MODEL} --gpu-memory-utilization ${UTIL} --port 8000\n")
    found = read_recipe(path)
    assert (found.model, found.gpu_memory_utilization) == ("A/a", 0.9)
    after = patch_recipe(found, NGRAM).text
    assert "--gpu-memory-utilization 0.85 --port 8000 --speculative-config" in after
    assert "--model ${MODEL}" in after


def test_compose_dollars_are_doubled_and_a_shell_inside_reads_them() -> None:
    text = COMPOSE.replace("vllm/vllm-openai:v0.27.1", "nvcr.io/nvidia/vllm:26.05-py3")
    text += "    environment:\n      MODEL: A/a\n    command: sh -c 'vllm serve $$MODEL --port 1'\n"
    assert read(text, "compose.yaml").model == "A/a"
    assert "$$MODEL --port 1 --speculative-config" in patched(text, "compose.yaml")


def test_compose_with_a_merged_service_but_its_own_command() -> None:
    text = (
        "x-gpu: &gpu\n  image: vllm/vllm-openai:v0.27.1\n  restart: always\nservices:\n  a:\n"
        "    <<: *gpu\n    command:\n      - A/a\n"
    )
    assert patched(text, "compose.yaml").endswith(
        '      - A/a\n      - --speculative-config\n      - \'{"method":"ngram","num_speculative_tokens":4}\'\n'
    )


def test_compose_list_at_the_indent_of_its_key_and_comments_between() -> None:
    text = (
        COMPOSE + "    command:\n    - --model\n    # the small one\n    - A/a   # ok\n\n"
        "    # network\n    network_mode: host\n"
    )
    after = patched(text, "compose.yaml")
    assert "    - A/a   # ok\n    - --speculative-config\n" in after
    assert after.endswith("4}'\n\n    # network\n    network_mode: host\n")


def test_compose_list_with_anchors_on_entries_is_refused() -> None:
    text = "x-m: &m A/a\n" + COMPOSE + "    command:\n      - --model\n      - *m\n"
    assert read(text, "compose.yaml").model == "A/a"
    with pytest.raises(InputFileError, match="YAML anchor"):
        patch_recipe(read(text, "compose.yaml"), NGRAM)


def test_kubernetes_variables_and_a_json_manifest() -> None:
    container = {
        "name": "c",
        "image": "vllm/vllm-openai:v0.27.1",
        "env": [{"name": "MODEL", "value": "A/a"}],
        "args": ["--model", "$(MODEL)", "--port=8000"],
    }
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [container]}}
    text = json.dumps(manifest, indent=2) + "\n"
    assert (read(text, "pod.json").model, read(text, "pod.json").service) == ("A/a", "p")
    after = json.loads(patched(text, "pod.json"))
    assert after["spec"]["containers"][0]["args"][:2] == ["--model", "$(MODEL)"]
    assert json.loads(after["spec"]["containers"][0]["args"][-1]) == NGRAM


def test_a_sidecar_beside_the_server_does_not_matter() -> None:
    text = (
        "apiVersion: apps/v1\nkind: StatefulSet\nmetadata:\n  name: s\nspec:\n  template:\n"
        "    spec:\n      initContainers:\n      - name: get\n        image: busybox\n"
        "      containers:\n      - name: proxy\n        image: nginx\n"
        "      - name: llm\n        image: vllm/vllm-openai:v0.27.1\n        args: [--model, A/a]\n"
    )
    assert read(text, "s.yaml").service == "llm"
    assert f"[--model, A/a, --speculative-config, '{json.dumps(NGRAM, separators=(',', ':'))}']" in patched(
        text, "s.yaml"
    )


def test_a_disaggregated_graph_asks_which_worker() -> None:
    worker = (
        "    - name: {n}\n      podTemplate:\n        spec:\n          containers:\n            - name: main\n"
        "              image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1\n"
        "              command: [python3, -m, dynamo.vllm]\n"
        "              args:\n                - --model\n                - A/a\n"
    )
    head = "apiVersion: nvidia.com/v1beta1\nkind: DynamoGraphDeployment\nmetadata: {name: g}\nspec:\n  components:\n"
    text = head + worker.format(n="Decode") + worker.format(n="Prefill")
    with pytest.raises(InputFileError, match=r"Decode .*Prefill"):
        read(text, "g.yaml")
    after = patch_recipe(read(text, "g.yaml", "Decode"), NGRAM).text
    assert after.index("--speculative-config") < after.index("Prefill")
    assert after.count("--speculative-config") == 1


def test_a_field_the_pinned_engine_lacks_is_named_for_dynamo() -> None:
    text = (
        "apiVersion: nvidia.com/v1alpha1\nkind: DynamoGraphDeployment\nmetadata: {name: g}\n"
        "spec:\n  services:\n    W:\n"
        "      extraPodSpec:\n        mainContainer:\n          image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1\n"
        "          command: [python3, -m, dynamo.vllm]\n          args: [--model, A/a]\n"
    )
    found = patch_recipe(read(text, "g.yaml"), {**NGRAM, "draft_lm_head_quantization": "fp8"})
    assert any("0.33" in note for note in found.notes)


def test_units_know_specifiers_prefixes_and_resets() -> None:
    text = (
        '[Service]\nEnvironment=UTIL=0.9 "MODEL=A/a"\nExecStart=/bin/true\nExecStart=\n'
        "ExecStart=-@/usr/bin/env vllm serve ${MODEL} --gpu-memory-utilization $UTIL --download-dir %h/models\n"
    )
    found = read(text, "x.service")
    assert (found.model, found.gpu_memory_utilization) == ("A/a", 0.9)
    after = patched(text, "x.service")
    assert "%h/models --speculative-config '{" in after
    assert "$UTIL" in after or "--gpu-memory-utilization 0.85" in after


def test_a_unit_whose_arguments_come_from_a_file_is_patched_before_them() -> None:
    text = "[Service]\nEnvironmentFile=/etc/vllm\nExecStart=/bin/sh -c 'exec vllm serve A/a --port 1 $VLLM_ARGS'\n"
    assert "A/a --port 1 --speculative-config" in patched(text, "x.service")


def test_a_byte_order_mark_and_odd_bytes_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_bytes(b"\xef\xbb\xbfvllm serve A/a # caf\xe9\n")
    data = patch_recipe(read_recipe(path), NGRAM).data
    assert data.startswith(b"\xef\xbb\xbfvllm serve A/a --speculative")
    assert data.endswith(b"# caf\xe9\n")
    (tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbf" + COMPOSE.encode() + b"    command: [--model, A/a]\n")
    assert patch_recipe(read_recipe(tmp_path / "c.yaml"), NGRAM).text.count("A/a, --speculative-config") == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.sh", "${a:-" * 5000),
        ("x.sh", "X=(\n" + "# c\n" * 5000),
        ("x.yaml", "[" * 1200),
        ("x.yaml", "kind: P\na: &a [*a]\n"),
        ("x.yaml", "services: &s\n  <<: *s\n"),
        (
            "x.yaml",
            "kind: P\na: &a [1, 1]\n"
            + "".join(f"{c}: &{c} [{', '.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
        ),
        ("x.sh", "x" * 300_000),
    ],
    ids=["defaults", "array", "brackets", "own alias", "own merge", "many aliases", "large"],
)
def test_hostile_files_are_refused_in_a_sentence(name: str, text: str) -> None:
    with pytest.raises(InputFileError, match=rf"^{name}"):
        read(text, name)


def test_deep_json_is_replaced_not_crashed_on() -> None:
    text = "vllm serve A/a --speculative-config '" + '{"a":' * 5000 + "'\n"
    assert [d.name for d in read(text).diagnoses] == ["not-json"]
    assert patched(text) == f"vllm serve A/a {FLAG}\n"
