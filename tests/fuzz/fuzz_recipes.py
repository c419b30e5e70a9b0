"""Recipes of every kind: read, patched, read again, written, undone; and the JSON of ``--speculative-config``."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from fuzz_harness import Case, Surface, expect
from fuzz_mutations import NASTY_TEXTS, damaged, dump, repeated, trees
from hypothesis import strategies as st

from surespec.apply import plan_apply, undo, write
from surespec.cli_plan import _print_json, _recipe_line
from surespec.cli_recipe import _config
from surespec.errors import SurespecError
from surespec.local.speculative import parse_speculative_config
from surespec.recipe import patch_recipe, read_recipe, read_text
from surespec.recipe.command import command_of, secrets_of
from surespec.recipe.diagnose import config_faults, read_json
from surespec.recipe.speculation import options_file
from surespec.recipe.text import Source

DATA = Path(__file__).parents[1] / "data" / "recipes"
CONFIGS: tuple[dict[str, Any] | None, ...] = (
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    {"method": "eagle3", "model": "org/it's a $HEAD %n", "num_speculative_tokens": 3},
    {"method": "draft_model", "model": "a/b", "num_speculative_tokens": 5},
    None,
)
SERVERS = (
    "vllm serve Qwen/Qwen3-8B", "docker run --rm -p 80:8000 vllm/vllm-openai:v0.27.1 --model a/b", "llama-server -m a.gguf",
    "python3 -m sglang.launch_server --model-path a/b", "trtllm-serve a/b", "python -m dynamo.vllm --model a/b",
    "exec env A=1 vllm serve a/b", "sh -c 'vllm serve a/b'", "docker run --entrypoint vllm vllm/vllm-openai serve a/b",
)  # fmt: skip
PIECES = (
    " \\\n  ", "\n", "; ", " && ", " | tee log", " # why", '"', "'", "`", "$(", ")", "${A:-b}", "${A[@]}", '"${A[@]}"', "$A", "$@",
    "A=(", "A+=(x)", "<<EOF\n", "EOF\n", "if true; then\n", "fi\n", "for x in 1; do\n", "done\n", "case a in\n", "esac\n", "<(x)",
    "> f", "2>&1", "export A=b\n", "cd ~\n", "$'a\\'b'", '$"a"', "eval ", "bash -c ", "--port", "--port=8001", "-p", "--model",
    "--speculative-config", '\'{"method":"ngram","num_speculative_tokens":3}\'', '{"method":"ngram"}', "--speculative_config=",
    '"{\\"method\\":\\"ngram\\",\\"num_speculative_tokens\\":$K}"', "--gpu-memory-utilization 0.9", "--spec-type", "ngram-simple",
    "--speculative-algorithm EAGLE3", "--num-speculative-tokens 5", "--speculative-model [ngram]", "--", "-", "--x=", "\r\n", "\t",
)  # fmt: skip
YAML_PIECES = (
    "services:\n", "  a:\n", "    image: vllm/vllm-openai:v0.27.1\n", "    command:\n", "      - --model\n", "      - a/b\n",
    "    command: >-\n", "    command: |2\n", "      --model a/b\n", "    command: [--model, a/b]\n", "    command: --model a/b\n",
    "    environment:\n", "      - A=b\n", "      A: b\n", "    entrypoint: [vllm, serve]\n", "kind: Deployment\n", "spec:\n",
    "  containers:\n", "  - name: x\n", "    args: ['--model', \"a\\x41b\"]\n", "kind: DynamoGraphDeployment\n", "---\n", "...\n",
    "x: &a\n", "  <<: *a\n", "    <<: [*a, *a]\n", "# c\n", "      - '--speculative-config={\"method\":\"ngram\"}'\n", "${A:-b}", "$$",
    "      - \"\\u2028\"\n", "? a\n", ": b\n", "!!binary aGk=\n", "%YAML 1.1\n", "- - -\n", "{a: [b, {c: d}]}\n", "\t", "  ", "    ",
)  # fmt: skip
UNIT_PIECES = (
    "[Service]\n", "[Unit]\n", "ExecStart=", "ExecStart=\n", "ExecStart=-@/bin/sh -c 'vllm serve a/b'\n", "Environment=A=b\n",
    'Environment="A=b c" B=$A\n', "/usr/bin/vllm serve a/b", " --port 8001", " ${A}", " $A", " $$", " %h", " %%", " \\\n", "\n", " '", ' "',
    " \\x41", " \\", ";c\n", "#c\n", "key\n", "WorkingDirectory=-/tmp\n", " --speculative-config '{\"method\":\"ngram\"}'",
)  # fmt: skip

_files = [(p.name, p.read_bytes()) for p in sorted(DATA.iterdir()) if p.is_file()]


def _file(suffixes: tuple[str, ...]) -> st.SearchStrategy[tuple[str, bytes]]:
    chosen = [f for f in _files if Path(f[0]).suffix in suffixes]

    def damage(file: tuple[str, bytes]) -> st.SearchStrategy[tuple[str, bytes]]:
        return damaged(st.just(file[1])).map(lambda data: (file[0], data))

    return st.sampled_from(chosen) | st.sampled_from(chosen).flatmap(damage)


def _soup(name: str, pieces: tuple[str, ...], start: str = "") -> st.SearchStrategy[tuple[str, bytes]]:
    part = st.sampled_from(pieces) | st.sampled_from(pieces) | st.sampled_from(pieces) | st.sampled_from(NASTY_TEXTS)
    text = st.lists(part, min_size=1, max_size=12).map(lambda parts: start + "".join(parts))
    return text.map(lambda t: (name, t.encode("utf-8", "surrogatepass")))


@st.composite
def _shell_soup(draw: st.DrawFn) -> tuple[str, bytes]:
    parts = draw(st.lists(st.sampled_from(PIECES) | st.sampled_from(NASTY_TEXTS), max_size=10))
    parts.insert(draw(st.integers(0, len(parts))), draw(st.sampled_from(SERVERS)))
    blank = draw(st.sampled_from((" ", " ", "", "\n")))
    return draw(st.sampled_from(("run.sh", "run"))), blank.join(parts).encode("utf-8", "surrogatepass")


def _long(name: str, pieces: tuple[str, ...], start: bytes = b"") -> st.SearchStrategy[tuple[str, bytes]]:
    spelled = tuple(p.encode() for p in pieces)
    return repeated(spelled, 250_000).map(lambda data: (name, (start + data)[: 1 << 18]))


def _cases(files: st.SearchStrategy[tuple[str, bytes]]) -> st.SearchStrategy[Case]:
    return st.tuples(files, st.sampled_from(range(len(CONFIGS))))


def _check(case: Case, folder: Path) -> None:
    """Read, show, patch; where that works: what is read back is what was asked for, and undo restores every byte."""
    (name, data), choice = case
    path = folder / name
    path.write_bytes(data)
    config = CONFIGS[choice]
    recipe = read_recipe(path)
    shown = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")  # as the command line sets it
    with contextlib.redirect_stdout(shown):
        _print_json(recipe.document())
        print(_recipe_line(recipe), *recipe.diagnoses)
    secrets_of(recipe, {})
    with contextlib.suppress(SurespecError):
        command_of(recipe, {"HOME": "/root", "PATH": "/bin"})
    applied = plan_apply(path, config)
    if len(data) > 20_000:  # what follows reads it four times more, and no command does all of this
        return
    again = read_text(path, Source(name, applied.patched.text), index=recipe.index)
    if recipe.engine in ("vllm", "dynamo"):
        expect(
            again.speculative_config == config, "a patch is read back as something else", repr(again.speculative_config)
        )
    expect(bool(config) == again.speculates or recipe.engine not in ("vllm", "dynamo"), "speculates after the patch")
    expect(not patch_recipe(again, config, lower_utilization=False).changed, "a second patch changes something")
    write(applied)
    expect(path.read_bytes() == applied.patched.data, "what was written is not the patch")
    if applied.patched.changed:
        undo(path)
    expect(path.read_bytes() == data, "undo does not restore the bytes")


def _check_options(case: Case, folder: Path) -> None:
    path = folder / "options.yaml"
    path.write_bytes(case)
    options_file(path)


SPECS = (
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    {"method": "eagle3", "model": "smollm2-135m-eagle3", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1},
    {"model": "ngram", "num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 64, 0]]},
    {"method": "draft_model", "model": "/nowhere", "num_speculative_tokens": 5, "max_model_len": 64,
     "draft_sample_method": "probabilistic", "rejection_sample_method": "standard"},
)  # fmt: skip
_spec_texts = trees(SPECS).map(dump)
_wrapped = st.sampled_from(("{}", "'{}'", '"{}"', "{{{}}}", "\\{}", " {} ", "“{}”")).flatmap(
    lambda form: _spec_texts.map(lambda text: form.replace("{}", text))
)


def _check_spec(text: Case, _folder: Path) -> None:
    """Every reader of the flag: apply's, the recipes' and the embedded engine's."""
    reading = read_json(text)
    expect(reading.config is not None or reading.faults, "no config and no fault")
    if reading.config is not None:
        for fault in config_faults(reading.config, 1, "0.11.0"):
            expect(len(fault.sentence) < 9000, "a fault of many words", fault.name)
    with contextlib.suppress(SurespecError):
        _config(text)
    config = parse_speculative_config(text)
    json.dumps(config.document(), allow_nan=False)
    expect(all(0 <= config.k_for_batch(b) <= 32 for b in (1, 2, 7, 1000)), "k out of range")


def _check_spec_cli(text: Case, _folder: Path) -> None:
    _config(text)


SURFACES = (
    Surface("recipe-shell", _cases(_file((".sh",)) | _shell_soup() | st.binary(max_size=60).map(lambda b: ("x.sh", b))), _check, share=2),
    Surface("recipe-yaml", _cases(_file((".yaml", ".yml")) | _soup("compose.yaml", YAML_PIECES) | _soup("a.yaml", YAML_PIECES, "services:\n  a:\n    image: vllm/vllm-openai:v0.27.1\n")), _check),
    Surface("recipe-unit", _cases(_file((".service",)) | _soup("a.service", UNIT_PIECES, "[Service]\nExecStart=/bin/vllm serve a/b ")), _check),
    Surface("recipe-long", _cases(
        _long("a.sh", PIECES, b"vllm serve a/b ") | _long("a.sh", PIECES) | _long("a.service", UNIT_PIECES, b"[Service]\n")
        | _long("a.yaml", YAML_PIECES)), _check, share=0.05, quick=6),
    Surface("spec-json", _spec_texts | _spec_texts | _wrapped | st.text(max_size=40), _check_spec, share=1.5),
    Surface("spec-flag", _spec_texts | st.text(max_size=40), _check_spec_cli, share=0.3, quick=20),
    Surface("trtllm-options", damaged(st.just(b"speculative_config:\n  decoding_type: Eagle3\n  max_draft_len: 3\n")) |
            _soup("x", YAML_PIECES).map(lambda f: f[1]), _check_options, share=0.3, quick=20),
)  # fmt: skip
