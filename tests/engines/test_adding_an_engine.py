"""docs/adding-an-engine.md, done: its file is taken from the page, added by its one line, and tuned with."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from surespec import engines
from surespec.errors import ConfigError
from surespec.tune import TuneProgress, tune
from surespec.tune_plan import TuneOptions

PAGE = Path(__file__).parents[2] / "docs" / "adding-an-engine.md"
SERVER = Path(__file__).with_name("acme_serve.py")


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """The engine of the page, and its program."""
    source, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "acme.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("surespec.engines.acme", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "surespec.engines.acme", module)
    spec.loader.exec_module(module)
    ((name, entry),) = eval("{" + line + "}").items()
    monkeypatch.setitem(engines._MAKERS, name, entry)
    monkeypatch.setattr("surespec.tune_plan.ENGINES", tuple(engines._MAKERS))
    monkeypatch.setattr("surespec.tune_existing.find_existing", tuple)  # other servers here are not the point
    program = tmp_path / "acme-serve"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SERVER}" "$@"\n')
    program.chmod(0o755)
    return file, program


def options(tmp_path: Path, program: Path, **change: object) -> TuneOptions:
    return TuneOptions(
        model="m", engine="acme", engine_program=str(program), concurrency=(1,), num_prompts=4, output_len=24,
        out=tmp_path / "run", **change,
    )  # fmt: skip


def test_a_whole_tune_with_the_engine_of_the_page(acme, tmp_path):
    _, program = acme
    judgement = tune(options(tmp_path, program), TuneProgress())
    assert judgement.verdict == "keep", judgement.why
    assert judgement.speculative_config["method"] == "ngram"
    assert "acme-serve --model m --port 8000 --draft" in judgement.command
    assert judgement.ratios["c1"].throughput_tok_s.low > 1.3
    assert json.loads((tmp_path / "run" / "judgement.json").read_text())["verdict"] == "keep"
    left = subprocess.run(["pgrep", "-f", str(SERVER)], capture_output=True, text=True, check=False).stdout.split()
    assert left == []


def test_its_log_explains_a_failure(acme, tmp_path):
    _, program = acme
    judgement = tune(
        TuneOptions(model="broken", engine="acme", engine_program=str(program), concurrency=(1,), out=tmp_path / "run"),
        TuneProgress(),
    )
    assert judgement.verdict == "failed"
    assert "weights of 'broken' are damaged" in judgement.why


def test_the_page_passes_the_projects_own_checks(acme):
    file, _ = acme
    root = PAGE.parents[1]
    for command in (
        [sys.executable, "-m", "ruff", "check", "--config", str(root / "pyproject.toml"), str(file)],
        [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), str(file)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_an_engine_nobody_added_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"Known: local, vllm, .*dynamo"):
        engines.make_engine("acme", model="m")
