"""A GGUF written as a Hugging Face folder is the same model: weights, configuration, tokenizer, template."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import toy
from surespec.errors import FetchError
from surespec.local.export_hf import gguf_to_hf
from surespec.local.tokenizer import load_tokenizer
from surespec.local.weights import load_model_files


def test_the_folder_is_the_same_model(tmp_path: Path) -> None:
    gguf = toy.make_gguf(tmp_path / "toy.gguf", toy.make_llama(tmp_path / "toy"))
    folder = tmp_path / "hf"
    gguf_to_hf(gguf, folder)
    before, after = load_model_files(gguf), load_model_files(folder)
    assert after.config == before.config
    assert after.chat_template == before.chat_template
    assert set(after.tensors) == set(before.tensors)
    for name in before.tensors:
        np.testing.assert_array_equal(after.tensors[name], before.tensors[name])
    text = "The quick brown fox, 123 times."
    assert load_tokenizer(after).encode(text) == load_tokenizer(before).encode(text)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_second_time_replaces_the_folder(tmp_path: Path) -> None:
    gguf = toy.make_gguf(tmp_path / "toy.gguf", toy.make_llama(tmp_path / "toy"))
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "stale").touch()
    gguf_to_hf(gguf, folder)
    assert not (folder / "stale").exists()
    assert (folder / "model.safetensors").stat().st_mode & 0o044


def test_no_room_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("surespec.local.export_hf.save_file", full)
    with pytest.raises(FetchError, match="No space left"):
        gguf_to_hf(toy.make_gguf(tmp_path / "toy.gguf", toy.make_llama(tmp_path / "toy")), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
