"""Built-in prompt sets and prompts of the user's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from surespec.bench.workload import (
    BUILTIN,
    CATEGORIES,
    CHARS_PER_TOKEN,
    Prompt,
    load_prompts,
    load_workload,
    read_jsonl,
)
from surespec.errors import InputFileError, UsageError

AT_LEAST = {"chat": 16, "code": 16, "copy": 16}


def length(prompt: Prompt) -> int:
    return sum(len(str(message["content"])) for message in prompt.messages)


@pytest.mark.parametrize("category", CATEGORIES)
def test_each_category_is_large_enough_and_short_enough(category: str) -> None:
    prompts = load_prompts(category)
    assert len(prompts) >= AT_LEAST.get(category, 10)
    assert {prompt.category for prompt in prompts} == {category}
    assert max(map(length, prompts)) <= 700 * CHARS_PER_TOKEN


def test_all_ids_and_texts_differ_and_warm_up_is_apart() -> None:
    loaded = load_workload("mixed")
    every = [*loaded.prompts, *loaded.warmup]
    assert len({prompt.id for prompt in every}) == len(every)
    texts = [json.dumps(prompt.messages) for prompt in every]
    assert len(set(texts)) == len(texts)
    assert len(loaded.warmup) >= 8


@pytest.mark.parametrize("name", BUILTIN)
def test_order_is_the_same_every_time_and_a_shorter_run_is_a_prefix(name: str) -> None:
    prompts = load_prompts(name)
    assert prompts == load_prompts(name)
    assert load_prompts(name, 5) == prompts[:5]


@pytest.mark.parametrize("count", [9, 18, 36, 90])
def test_mixed_is_balanced(count: int) -> None:
    counts = Counter(prompt.category for prompt in load_prompts("mixed", count))
    assert set(counts) == set(CATEGORIES) and set(counts.values()) == {count // 9}


def test_quick_has_two_of_each() -> None:
    assert set(Counter(prompt.category for prompt in load_prompts("quick")).values()) == {2}


def test_extraction_tools_and_reasoning_state_what_is_expected() -> None:
    for category in ("extraction", "tools", "reasoning"):
        assert all(prompt.expected for prompt in load_prompts(category))
    assert all("arguments" in str(prompt.messages[0]["content"]) for prompt in load_prompts("tools"))


def test_asking_for_more_repeats_with_new_ids_and_says_so() -> None:
    loaded = load_workload("tools", 25)
    assert len({prompt.id for prompt in loaded.prompts}) == 25
    assert loaded.prompts[11].id == "tools-01#2" and loaded.prompts[22].id == "tools-01#3"
    assert loaded.prompts[11].messages == loaded.prompts[0].messages
    assert "prompts repeat" in loaded.warnings[0]
    assert load_workload("tools", 11).warnings == ()


@pytest.mark.parametrize("input_len", [40, 300, 2048])
def test_input_len_sets_the_length_and_keeps_the_question_at_the_end(input_len: int) -> None:
    loaded = load_workload("summarise", 12, input_len=input_len)
    assert all(abs(length(prompt) - input_len * CHARS_PER_TOKEN) <= 40 for prompt in loaded.prompts)
    assert any("estimate" in warning for warning in loaded.warnings)
    if input_len == 2048:
        for sized, plain in zip(loaded.prompts, load_prompts("summarise", 12), strict=True):
            assert str(sized.messages[-1]["content"]).endswith(str(plain.messages[-1]["content"]))
        assert len({sized.messages[0]["content"] for sized in loaded.prompts}) == 12


@pytest.mark.parametrize("bad", [{"num_prompts": 0}, {"num_prompts": -3}, {"input_len": 0}])
def test_numbers_below_one(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        load_workload("chat", **bad)


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_users_file(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    lines: list[dict[str, Any]] = [
        {"prompt": "Grüße aus Köln"},
        {
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            "id": "mine",
            "category": "x",
        },
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "part"}]}],
            "tools": tools,
            "max_tokens": 7,
        },
        {"prompt": "p", "model": "ignored", "temperature": 1, "id": 12},
    ]
    text = "\ufeff" + "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n"
    loaded = load_workload(write(tmp_path, text))
    first, second, third, fourth = loaded.prompts
    assert (first.id, first.category, first.as_text()) == ("line-1", "custom", "Grüße aus Köln")
    assert first.messages == ({"role": "user", "content": "Grüße aus Köln"},)
    assert (second.id, second.category) == ("mine", "x") and second.as_text() == "system: s\n\nuser: u\n\nassistant:"
    assert third.extra == {"tools": tools} and third.max_tokens == 7 and "part" in third.as_text()
    assert fourth.id == "12" and fourth.extra == {}
    assert loaded.name == "prompts.jsonl" and loaded.categories == ("custom", "x")
    assert not {prompt.id for prompt in loaded.warmup} & {prompt.id for prompt in loaded.prompts}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2 is not JSON"),
        ("42", "line 2 is not a JSON object"),
        ("{}", 'line 2 must have either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', "either"),
        ('{"prompt": "  "}', "not empty"),
        ('{"prompt": null}', "not empty"),
        ('{"prompt": ["a"]}', "not empty"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": "hi"}', "at least one message"),
        ('{"messages": [{"content": "x"}]}', "message 1 must be an object"),
        ('{"messages": [{"role": "user"}]}', r"message 1 \(user\) has no"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens"),
        ('{"prompt": "a", "id": ""}', "id"),
        ('{"prompt": "a", "promt": 1}', "unknown key 'promt'"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, '{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(InputFileError, match=message) as caught:
        read_jsonl(path)
    assert "prompts.jsonl" in str(caught.value) and "line 2" in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompts"),
        (b"\n \n", "has no prompts"),
        (b'{"prompt": "a"}\n\xff\xfe\n', "line 2 is not UTF-8"),
        (b"GGUF\x00\x03\x00", "binary"),
        (b'{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n', "id 'x' twice"),
    ],
)
def test_files_without_usable_prompts(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(InputFileError, match=message):
        read_jsonl(write(tmp_path, content))


def test_missing_file_lists_the_sets_and_a_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no prompt set or file") as caught:
        load_workload("chta")
    assert "chat" in caught.value.hint and "mixed" in caught.value.hint
    with pytest.raises(InputFileError, match="is a directory"):
        load_workload(tmp_path)


def test_input_len_with_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="built-in"):
        load_workload(write(tmp_path, '{"prompt": "a"}'), input_len=10)
