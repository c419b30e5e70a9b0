"""Generated recipes: patch then undo is the identity, twice equals once, and every parser gets the same config back."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from surespec.apply import plan_apply, undo, write
from surespec.errors import InputFileError
from surespec.recipe import patch_recipe, read_text
from surespec.recipe.arguments import commands
from surespec.recipe.diagnose import read_json
from surespec.recipe.jsontext import change_keys
from surespec.recipe.shell import read_shell
from surespec.recipe.text import FILE, Edit, Source, UnwritableError, apply_edits
from surespec.recipe.unit_words import quote_unit

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXT = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=20)
MODEL = st.sampled_from(["Qwen/Qwen3-8B", "/models/a b", "meta-llama/Llama-3.1-8B-Instruct", "org/it's"])
CONFIG = st.fixed_dictionaries(
    {"method": st.just("eagle3"), "model": TEXT | MODEL, "num_speculative_tokens": st.integers(1, 16)},
    optional={
        "draft_tensor_parallel_size": st.integers(1, 8),
        "num_speculative_tokens_per_batch_size": st.just([[1, 4, 5], [5, 64, 0]]),
        "parallel_drafting": st.booleans(),
    },
)
OTHERS = [
    ("--port", "8001"),
    ("--max-model-len", "8192"),
    ("--gpu-memory-utilization", "0.9"),
    ("--served-model-name", "a b"),
    ("--enable-prefix-caching", None),
    ("--override-generation-config", '{"temperature": 0.2}'),
]
FLAGS = st.lists(st.sampled_from(OTHERS), unique=True)
ENDS = st.sampled_from(["\n", "\r\n"])


def spellings(flag: tuple[str, str | None], joined: bool, under: bool) -> list[str]:
    name = flag[0].replace("-", "_").replace("__", "--", 1) if under else flag[0]
    if flag[1] is None:
        return [name]
    return [f"{name}={flag[1]}"] if joined else [name, flag[1]]


@st.composite
def shell_recipes(draw: st.DrawFn) -> tuple[str, str]:
    joined, under = draw(st.booleans()), draw(st.booleans())
    quote = draw(st.sampled_from([shlex.quote, lambda t: f'"{in_double(t)}"']))
    flags = list(draw(FLAGS))
    if draw(st.booleans()):
        flags.insert(draw(st.integers(0, len(flags))), ("--speculative-config", json.dumps(draw(CONFIG))))
    groups = [" ".join(quote(w) if i else w for i, w in enumerate(spellings(f, False, under))) for f in flags]
    if joined:
        groups = [f"{f[0]}={quote(f[1])}" if f[1] is not None else f[0] for f in flags]
    between = draw(st.sampled_from([" ", " \\\n  ", " \\\n\t"]))
    start = draw(
        st.sampled_from(["vllm serve ", "exec vllm serve ", "docker run --rm -e A=b vllm/vllm-openai:v0.27.1 "])
    )
    tail = draw(st.sampled_from(["", " > log 2>&1 &", "  # end", ' "$@"', " || exit 1"]))
    text = start + between.join(["Qwen/Qwen3-8B", *groups]) + tail + draw(st.sampled_from(["", "\n", "\n\n# x\n"]))
    if draw(st.booleans()):
        text = text.replace("\n", "\r\n")
    return "run.sh", text


@st.composite
def array_recipes(draw: st.DrawFn) -> tuple[str, str]:
    lines = [" ".join([f[0], *([shlex.quote(f[1])] if f[1] is not None else [])]) for f in draw(FLAGS)]
    comment = draw(st.sampled_from(["", "  # why"]))
    body = "".join(f"  {line}{comment}\n" for line in lines)
    return "run.sh", f'#!/bin/bash\nARGS=(\n{body})\nvllm serve Qwen/Qwen3-8B "${{ARGS[@]}}"\n'


@st.composite
def compose_recipes(draw: st.DrawFn) -> tuple[str, str]:
    words = ["--model", "Qwen/Qwen3-8B"]
    for flag in draw(FLAGS):
        words += spellings(flag, draw(st.booleans()), False)
    if draw(st.booleans()):
        words += ["--speculative-config", json.dumps(draw(CONFIG)).replace("$", "$$")]
    style = draw(st.sampled_from(["block", "flow", "folded", "literal"]))
    items = [f"'{w.replace(chr(39), chr(39) * 2)}'" if draw(st.booleans()) else json.dumps(w) for w in words]
    if style == "block":
        body = "command:\n" + "".join(f"      - {i}\n" for i in items)
    elif style == "flow":
        body = f"command: [{', '.join(items)}]\n"
    else:
        sign = {"folded": ">", "literal": "|"}[style] + draw(st.sampled_from(["", "-"]))
        body = f"command: {sign}\n" + "".join(f"      {shlex.quote(w)}\n" for w in words)
    after = draw(st.sampled_from(["", "    restart: always\n", "    # end\n\n"]))
    text = f"# top\nservices:\n  llm:\n    image: vllm/vllm-openai:v0.27.1  # pin\n    {body}{after}"
    return "compose.yaml", text.replace("\n", draw(ENDS))


@st.composite
def unit_recipes(draw: st.DrawFn) -> tuple[str, str]:
    words = ["/opt/vllm/bin/vllm", "serve", "Qwen/Qwen3-8B"]
    for flag in draw(FLAGS):
        words += spellings(flag, draw(st.booleans()), False)
    if draw(st.booleans()):
        words += ["--speculative-config", json.dumps(draw(CONFIG))]
    between = draw(st.sampled_from([" ", " \\\n    "]))
    return "vllm.service", f"[Service]\nExecStart={between.join(quote_unit(w) for w in words)}\nRestart=always\n"


RECIPES = shell_recipes() | array_recipes() | compose_recipes() | unit_recipes()


@FEW
@given(RECIPES, st.none() | CONFIG)
def test_patch_then_undo_is_the_identity(recipe: tuple[str, str], config: dict[str, Any] | None) -> None:
    name, text = recipe
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(text.encode())
        applied = plan_apply(path, config)
        write(applied)
        assert path.read_bytes() == applied.patched.data
        if applied.patched.changed:
            assert undo(path) == (path, True)
        assert path.read_bytes() == text.encode()


@FEW
@given(RECIPES, st.none() | CONFIG)
def test_patching_twice_equals_once_and_says_what_was_asked(
    recipe: tuple[str, str], config: dict[str, Any] | None
) -> None:
    name, text = recipe
    before = read_text(Path(name), Source(name, text))
    once = patch_recipe(before, config)
    after = read_text(Path(name), Source(name, once.text))
    assert after.speculative_config == config
    assert not patch_recipe(after, config).changed
    changed = {"--speculative-config", "--gpu-memory-utilization"}
    assert {k: v for k, v in after.flags.items() if k not in changed} == {
        k: v for k, v in before.flags.items() if k not in changed
    }
    assert once.text.endswith("\n") is text.endswith("\n")
    assert ("\r" in once.text) is ("\r" in text and "\n" in once.text)
    bare = once.text.replace("\r\n", "")
    assert "\r" not in bare
    assert "\r\n" not in text or "\n" not in bare


@FEW
@given(RECIPES, CONFIG)
def test_removing_what_was_added_gives_the_first_text(recipe: tuple[str, str], config: dict[str, Any]) -> None:
    name, text = recipe
    before = read_text(Path(name), Source(name, text))
    if before.speculates:
        return
    added = patch_recipe(before, config, lower_utilization=False)
    removed = patch_recipe(read_text(Path(name), Source(name, added.text)), None)
    assert removed.text == text


@FEW
@given(st.lists(TEXT.filter(bool), min_size=1, max_size=4))
@example(["it's", 'a "b" $c `d` \\e', "#x", "~", "{a,b}"])
def test_words_as_quoted_are_read_as_shlex_reads_them(words: list[str]) -> None:
    for line in ("run " + shlex.join(words), "run " + " ".join('"' + in_double(w) + '"' for w in words)):
        source = Source("x", line)
        read = commands(read_shell(source.chars(), source), FILE)
        assert [a.text for a in read[0]] == ["run", *words]


def in_double(word: str) -> str:
    return "".join("\\" + c if c in '\\"$`' else c for c in word)


@FEW
@given(CONFIG, CONFIG, st.sampled_from([(", ", ": "), (",", ":"), (" , ", " : ")]), st.sampled_from([None, 2]))
def test_keys_change_in_place(old: dict[str, Any], new: dict[str, Any], marks: Any, indent: int | None) -> None:
    text = json.dumps(old, separators=marks, indent=indent)
    source = Source("x", text)
    changed = apply_edits(text, change_keys(source.chars(), new))
    assert json.loads(changed) == new
    for key in old.keys() & new.keys():
        assert json.dumps(key) in changed


@FEW
@given(TEXT, TEXT)
def test_any_text_at_all_is_read_or_refused_in_words(before: str, after: str) -> None:
    for name in ("x.sh", "x.yaml", "x.service"):
        text = f"{before}\nvllm serve A/a {after}\n"
        try:
            found = read_text(Path(name), Source(name, text))
            patch_recipe(found, {"method": "ngram", "num_speculative_tokens": 3})
        except InputFileError as error:
            assert error.message.startswith(f"{name}, line ")


@FEW
@given(st.text(max_size=60))
def test_any_value_is_a_config_or_has_a_fault(text: str) -> None:
    reading = read_json(text)
    assert reading.config is not None or reading.faults


@FEW
@given(CONFIG)
def test_a_yaml_entry_is_read_back_by_a_yaml_library(config: dict[str, Any]) -> None:
    text = "services:\n  a:\n    image: vllm/vllm-openai:v0.27.1\n    command:\n      - --model\n      - A/a\n"
    after = patch_recipe(read_text(Path("c.yaml"), Source("c.yaml", text)), config).text
    command = YAML(typ="safe", pure=True).load(after)["services"]["a"]["command"]
    assert json.loads(command[-1].replace("$$", "$")) == config


def test_overlapping_changes_are_refused() -> None:
    with pytest.raises(UnwritableError):
        apply_edits("abcdef", [Edit(0, 3, "x"), Edit(2, 4, "y")])
