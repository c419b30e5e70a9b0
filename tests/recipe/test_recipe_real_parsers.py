"""What bash, a YAML library and systemd's rules make of patched files: the server gets the config asked for."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from surespec.recipe import patch_recipe, read_recipe, read_text
from surespec.recipe.text import Source

DATA = Path(__file__).parents[1] / "data" / "recipes"
SCRIPTS = sorted(p.name for p in DATA.glob("*.sh"))
MANIFESTS = sorted(p.name for p in [*DATA.glob("*.yaml"), *DATA.glob("*.yml")])
UNITS = sorted(p.name for p in DATA.glob("*.service"))
AWKWARD = {
    "method": "eagle3",
    "model": 'it\'s $HOME/100% "odd" #1 \\ name',
    "num_speculative_tokens": 3,
    "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 64, 0]],
}
PROGRAMS = ("docker", "vllm", "python", "python3", "llama-server", "pip", "sudo", "nohup", "sleep")
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """Programs that write down how they were called, and do nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in PROGRAMS:
        script = '#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" > "$CALLS/$$"\n'
        if name in ("nohup", "sudo"):
            script = '#!/bin/bash\nexec "$@"\n'
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return folder


def calls_of(command: list[str], stubs: Path, cwd: Path) -> list[list[str]]:
    """The program calls a command makes, when nothing but the stubs can be called."""
    log = Path(tempfile.mkdtemp(prefix="calls", dir=cwd))  # a file a call: those in the background write at once
    env = {"PATH": f"{stubs}:/usr/bin:/bin", "CALLS": str(log), "HOME": "/nowhere"}
    # Its own session: Dynamo's scripts end with "kill 0", which ends every process of the group.
    subprocess.run(command, cwd=cwd, env=env, timeout=30, stdout=subprocess.DEVNULL, start_new_session=True)
    return [call.read_bytes().decode().removesuffix("\0").split("\0") for call in log.iterdir()]


def nested(calls: list[list[str]], stubs: Path, cwd: Path) -> Iterator[list[str]]:
    """The calls, and those made by a text that one of them gives to a shell."""
    for call in calls:
        yield call
        for i, word in enumerate(call[:-1]):
            if word in ("-c", "-lc") and call[i - 1].rsplit("/", 1)[-1] in ("bash", "sh"):
                yield from calls_of(["bash", "-c", call[i + 1]], stubs, cwd)


def given(argv: list[str]) -> dict[str, Any] | None:
    """The config in an argument list, as vLLM's argument parser would take it."""
    for i, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name.replace("_", "-") in ("--speculative-config", "-sc"):
            return json.loads(value or argv[i + 1])
    return None


def patched_file(name: str, config: dict[str, Any], folder: Path) -> Path:
    target = folder / name
    target.write_bytes(patch_recipe(read_recipe(DATA / name), config).data)
    return target


CONFIGS = pytest.mark.parametrize(
    "config",
    [{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}, AWKWARD],
    ids=["plain", "awkward"],
)


@needs_bash
@CONFIGS
@pytest.mark.parametrize("name", [n for n in SCRIPTS if "llama" not in n and "sglang" not in n])
def test_bash_gives_the_server_the_config(name: str, config: dict[str, Any], stubs: Path, tmp_path: Path) -> None:
    (tmp_path / "common.sh").write_text("build_gpu_mem_args() { echo --gpu-memory-utilization 0.8; }\n")
    script = patched_file(name, config, tmp_path)
    calls = list(nested(calls_of(["bash", "-c", '. "$0"; wait', str(script)], stubs, tmp_path), stubs, tmp_path))
    assert [c for c in map(given, calls) if c is not None] == [config]


@needs_bash
def test_bash_reads_every_flag_of_the_script_as_the_recipe_does(stubs: Path, tmp_path: Path) -> None:
    for name in SCRIPTS:
        if name in ("bash_c.sh", "dynamo_args.sh", "llama_server.sh"):
            continue
        script = tmp_path / name
        script.write_bytes((DATA / name).read_bytes())
        read = read_recipe(script)
        calls = calls_of(["bash", "-c", '. "$0"; wait', str(script)], stubs, tmp_path)
        ours = [a.text for a in read.server.args if not a.conditional]
        assert any(c[-len(ours) :] == ours for c in calls), name


def variables_filled(text: str) -> str:
    """Compose's own interpolation, for files whose variables all have defaults."""
    text = re.sub(r"(?<!\$)\$\{\w+:-([^}]*)\}", r"\1", text)
    return re.sub(r"(?<!\$)\$\{HF_TOKEN\}", "", text).replace("$$", "$")


def manifest_argv(document: dict[str, Any]) -> list[list[str]]:
    if "services" in document and "apiVersion" not in document:
        found = []
        for service in document["services"].values():
            parts = []
            for key in ("entrypoint", "command"):
                value = service.get(key) or []
                parts += (
                    shlex.split(variables_filled(value)) if isinstance(value, str) else map(variables_filled, value)
                )
            found.append(parts)
        return found
    text = json.dumps(document)
    containers = list(_containers(json.loads(text)))
    return [[*map(str, c.get("command", [])), *map(str, c.get("args", []))] for c in containers]


def _containers(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, list):
        for item in node:
            yield from _containers(item)
    elif isinstance(node, dict):
        if "image" in node:
            yield node
        for value in node.values():
            yield from _containers(value)


@CONFIGS
@pytest.mark.parametrize("name", MANIFESTS)
def test_yaml_gives_the_server_the_config(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    if config is AWKWARD and name in ("compose_string.yaml",):
        pytest.skip("a plain YAML text cannot hold it; that it is refused is tested below")
    target = patched_file(name, config, tmp_path)
    text = target.read_bytes().decode()
    found = []
    for document in YAML(typ="safe", pure=True).load_all(text):
        for argv in manifest_argv(document):
            if len(argv) > 2 and argv[-2] in ("-c", "-lc"):
                argv = shlex.split(argv[-1].replace("\\\n", " "), comments=True)
            found += [c for c in [given(argv)] if c is not None]
    assert found == [config]


def test_a_plain_yaml_text_that_cannot_hold_the_json_is_refused_with_the_flag() -> None:
    from surespec.errors import InputFileError

    with pytest.raises(InputFileError, match="line 4") as refused:
        patch_recipe(read_recipe(DATA / "compose_string.yaml"), AWKWARD)
    assert "--speculative-config" in refused.value.hint


def unit_argv(text: str) -> list[str]:
    """ExecStart= split by the rules of systemd.service(5), written apart from the product's reader."""
    joined = re.sub(r"\\\r?\n(?:[ \t]*[#;][^\n]*\n)*", " ", text)
    line = re.search(r"^ExecStart=(.*)$", joined, re.M)
    assert line is not None
    words: list[str] = []
    for found in re.finditer(r"((?:'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\\.|[^\s'\"\\])+)", line[1]):
        inner = re.sub(r"'((?:\\.|[^'\\])*)'|\"((?:\\.|[^\"\\])*)\"", lambda m: m[1] or m[2] or "", found[1])
        inner = re.sub(r"\\(.)", r"\1", inner)
        words.append(inner.replace("%%", "%").replace("$$", "$"))
    return words


@CONFIGS
@pytest.mark.parametrize("name", UNITS)
def test_systemd_gives_the_server_the_config(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    assert given(unit_argv(patched_file(name, config, tmp_path).read_text())) == config


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    target = patched_file(name, AWKWARD, tmp_path)
    text = re.sub(r"^(ExecStart(Pre)?=)\S+", r"\1/bin/true", target.read_text(), flags=re.M)
    target.write_text(re.sub(r"^(ExecStop|User|After)=.*\n", "", text, flags=re.M))
    env = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
    command = ["systemd-analyze", "verify", "--man=no", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=env)
    complaints = [line for line in done.stderr.splitlines() if target.name in line]
    assert not complaints, complaints


def test_an_awkward_config_is_read_back_from_every_shape() -> None:
    for name in [*SCRIPTS, *MANIFESTS, *UNITS]:
        read = read_recipe(DATA / name)
        if read.engine in ("llamacpp", "sglang") or name == "compose_string.yaml":
            continue
        text = patch_recipe(read, AWKWARD).text
        assert read_text(read.path, Source(name, text)).speculative_config == AWKWARD, name
