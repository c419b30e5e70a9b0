"""The tokenizer from both sources, text while tokens arrive, and chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import toy
from surespec.errors import ConfigError, ModelError
from surespec.local.chat import ChatTemplate
from surespec.local.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from surespec.local.weights import load_model_files

TEXT = "the 2024 rétro — 漢字 😀 and\n\n  x=1;\tit's"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_llama(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(load_model_files(folder))


def from_gguf(folder: Path, path: Path, pre: str = "smollm") -> Tokenizer:
    return load_tokenizer(load_model_files(toy.make_gguf(path, folder, pre=pre)))


def test_text_survives_and_special_tokens_are_one_id(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>" + TEXT + "<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>" + TEXT + "<|im_end|>"
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 320
    assert tokenizer.token_text(1) == "<|im_start|>"


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe", "default"])
def test_the_tokenizer_of_a_gguf(pre: str, folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    rebuilt = from_gguf(folder, tmp_path / "m.gguf", pre)
    assert rebuilt.decode(rebuilt.encode(TEXT)) == TEXT
    assert rebuilt.encode("<|im_start|>the and") == tokenizer.encode("<|im_start|>the and")
    assert len(rebuilt.encode("the")) == 1


@pytest.mark.parametrize(("pre", "pieces"), [("qwen2", 4), ("llama-bpe", 2), ("smollm", 4), ("gpt-2", 1)])
def test_how_digits_are_split(pre: str, pieces: int, folder: Path, tmp_path: Path) -> None:
    rebuilt = from_gguf(folder, tmp_path / "m.gguf", pre)
    assert len(rebuilt._backend.pre_tokenizer.pre_tokenize_str("2024")) == pieces


def test_tokenizers_that_are_not_supported(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'gpt2' with pre-tokenizer 'tekken', which is not supported"):
        from_gguf(folder, tmp_path / "m.gguf", "tekken")


def test_a_missing_broken_or_foreign_tokenizer(tmp_path: Path) -> None:
    folder = toy.make_llama(tmp_path / "m")
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"]["vocab"]["far"] = 5000
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match="token id 5000 lies outside the model's vocabulary of 320"):
        load_tokenizer(load_model_files(folder))
    path.write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(load_model_files(folder))
    path.unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(load_model_files(folder))


def test_saving(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "t.json")
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "t.json")).encode(TEXT).ids == tokenizer.encode(TEXT)


def test_half_a_character_is_held_back(tokenizer: Tokenizer) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("a😀b")
    assert len(ids) == 6
    assert [stream.push([i]) for i in ids] == ["a", "", "", "", "😀", "b"]
    cut = IncrementalDetokenizer(tokenizer)
    assert cut.push(ids[:3]) == "a"
    assert cut.flush() == "�"
    assert cut.flush() == ""


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 300), max_size=9), max_size=20))
def test_the_pieces_together_are_the_whole(tokenizer: Tokenizer, pushes: list[list[int]]) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    text = "".join([stream.push(ids) for ids in pushes]) + stream.flush()
    assert text == tokenizer.decode([i for ids in pushes for i in ids])


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_valid_text_streams_without_replacement_characters(tokenizer: Tokenizer, text: str) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    pieces = [stream.push([i]) for i in tokenizer.encode(text)] + [stream.flush()]
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text))


def test_the_models_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_what_templates_may_use() -> None:
    messages = [{"role": "user", "content": "<b>"}]
    tools = [{"name": "f", "text": "é<"}]
    source = (
        "{{ bos_token }}{%- for m in messages %}\n    {% generation %}\n{{ m.content }}\n    {% endgeneration %}\n"
        "{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ tools | tojson }}{{ strftime_now('%Y')|length }}"
    )
    assert ChatTemplate(source, "<s>").render(messages, tools=tools) == '<s><b>\n[{"name": "f", "text": "é<"}]4'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only user and assistant') }}", "refused the messages: only user and assistant"),
        ("{{ messages[0].x.y }}", "refused the messages"),
        ("{% for %}", "cannot be compiled"),
        ("{{ ().__class__.__bases__[0].__subclasses__() }}", "refused the messages"),
        ("{{ messages.append(1) }}", "refused the messages"),
        ("", r"no chat template.*\n?.*/v1/completions"),
        (None, "no chat template"),
    ],
)
def test_template_errors_are_configuration_errors(source: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
