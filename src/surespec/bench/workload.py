"""What is sent: the built-in prompt sets, and prompts from a JSONL file of the user's.

A built-in set is a category (``chat``, ``code``, ...), ``mixed`` (all categories in turn; the default) or ``quick``
(the first prompts of each). Their order never changes, so two runs with the same arguments send the same requests in
the same order and can be paired by prompt id.

Warm-up prompts come from a set of their own: a prompt sent twice would be answered from the server's prefix cache,
and a drafter that remembers earlier answers would look better than it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from surespec.errors import InputFileError, UsageError
from surespec.input_files import MIB, read_input
from surespec.json_text import loads_json

CATEGORIES: tuple[str, ...] = (
    "chat",
    "code",
    "summarise",
    "copy",
    "extraction",
    "reasoning",
    "multilingual",
    "tools",
    "structured",
)
BUILTIN: tuple[str, ...] = (*CATEGORIES, "mixed", "quick")
QUICK_PER_CATEGORY = 2
CHARS_PER_TOKEN = 4
_LINE_KEYS = frozenset({"prompt", "messages", "id", "category", "max_tokens", "expected"})
_PASSED_ON = frozenset({"tools", "tool_choice", "response_format", "stop"})
_IGNORED = frozenset({"model", "stream", "stream_options", "n", "temperature", "top_p", "seed", "metadata", "user"})
_MAX_FILE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to send.

    ``messages`` is the chat form. ``text`` is set when the user gave a plain prompt; the completions API sends it as it
    is, and builds a plain transcript from ``messages`` otherwise. ``max_tokens`` overrides the run's output length.
    ``extra`` holds request fields passed on unchanged (``tools``, ``response_format`` ...). ``expected`` is what a good
    answer contains, for a reader; nothing is measured against it.
    """

    id: str
    category: str
    messages: tuple[Mapping[str, Any], ...]
    text: str | None = None
    max_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    expected: str = ""

    def as_text(self) -> str:
        """The prompt as one string, for the completions API."""
        if self.text is not None:
            return self.text
        turns = [f"{m.get('role', 'user')}: {_content_text(m.get('content'))}" for m in self.messages]
        return "\n\n".join([*turns, "assistant:"])


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a benchmark in sending order, those of its warm-up, and what the user should know about both."""

    name: str
    prompts: tuple[Prompt, ...]
    warmup: tuple[Prompt, ...]
    warnings: tuple[str, ...] = ()

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories that occur, in order of first appearance."""
        return tuple(dict.fromkeys(p.category for p in self.prompts))


def load_workload(
    name_or_path: str | Path = "mixed", num_prompts: int | None = None, *, input_len: int | None = None
) -> PromptSet:
    """A built-in set by name, or a JSONL file by path, cut or repeated to ``num_prompts``.

    ``input_len`` brings each prompt of a built-in set to about that many tokens (estimated at four characters a token)
    by putting text of the same category in front, or by cutting the middle out.

    Raises:
        UsageError: ``num_prompts`` or ``input_len`` below 1, or ``input_len`` with a file.
        InputFileError: no such set or file, or a line of the file that cannot be used.
    """
    for flag, value in (("--num-prompts", num_prompts), ("--input-len", input_len)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} must be at least 1, not {value}.")
    builtin = str(name_or_path) in BUILTIN
    if not builtin and input_len is not None:
        raise UsageError(
            f"--input-len works on the built-in prompt sets; the prompts of {name_or_path} have their own length.",
            hint="Leave --input-len out, or choose a built-in set.",
        )
    pool = _builtin(str(name_or_path)) if builtin else read_jsonl(name_or_path)
    warnings: list[str] = []
    prompts, note = _take(pool, num_prompts or len(pool))
    warnings += note
    warmup = _packaged("warmup")
    if input_len is not None:
        prompts = [_sized(p, input_len) for p in prompts]
        warmup = tuple(_sized(p, input_len) for p in warmup)
        warnings.append(
            f"Prompts were brought to about {input_len} tokens by an estimate of {CHARS_PER_TOKEN} characters a token; "
            "the prompt_tokens of each trace say what the server counted."
        )
    name = str(name_or_path) if builtin else Path(name_or_path).name
    return PromptSet(name=name, prompts=tuple(prompts), warmup=warmup, warnings=tuple(warnings))


def load_prompts(
    name_or_path: str | Path = "mixed", num_prompts: int | None = None, *, input_len: int | None = None
) -> list[Prompt]:
    """The prompts of ``load_workload``, without the warm-up and the warnings."""
    return list(load_workload(name_or_path, num_prompts, input_len=input_len).prompts)


def read_jsonl(path: str | Path) -> tuple[Prompt, ...]:
    """Read a user's prompts: one JSON object a line with ``prompt`` or ``messages``; blank lines are skipped.

    What the benchmark itself decides (``model``, ``temperature``, ``seed`` ...) may stand in a line and is not used.

    Raises:
        InputFileError: naming the file, the line and what is wrong with it.
    """
    file = Path(path)
    if not file.exists():
        raise InputFileError(
            f"There is no prompt set or file named {path}.", hint=f"Built-in sets: {', '.join(BUILTIN)}."
        )
    raw = read_input(file, what="a JSONL file of prompts", most_bytes=_MAX_FILE_BYTES)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = raw[: err.start].count(b"\n") + 1
        raise InputFileError(
            f"{path} line {line} is not UTF-8 text (byte {err.start}).",
            hint="A prompts file has one JSON object a line.",
        ) from err
    if "\x00" in text:
        raise InputFileError(f"{path} is a binary file, not a JSONL file of prompts.")
    prompts = tuple(_parse_lines(text.split("\n"), str(path), default_category="custom"))
    if not prompts:
        raise InputFileError(
            f"{path} has no prompts.", hint='Write one JSON object a line, such as {"prompt": "Name three rivers."}'
        )
    _refuse_repeated_ids(prompts, str(path))
    return prompts


def _parse_lines(lines: Iterable[str], where: str, *, default_category: str) -> Iterator[Prompt]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        at = f"{where} line {number}"
        try:
            item = loads_json(line)
        except json.JSONDecodeError as err:
            raise InputFileError(f"{at} is not JSON: {err.msg} at column {err.colno}.") from err
        except ValueError as err:
            raise InputFileError(f"{at} cannot be read: {err}.") from err
        yield _parse_item(item, at, number, default_category)


def _parse_item(item: object, at: str, number: int, default_category: str) -> Prompt:
    if not isinstance(item, dict):
        raise InputFileError(f'{at} is not a JSON object with "prompt" or "messages".')
    unknown = sorted(item.keys() - _LINE_KEYS - _PASSED_ON - _IGNORED)
    if unknown:
        raise InputFileError(
            f"{at} has an unknown key {unknown[0]!r}.",
            hint=f"Known keys: {', '.join(sorted(_LINE_KEYS | _PASSED_ON))}.",
        )
    if ("prompt" in item) == ("messages" in item):
        raise InputFileError(f'{at} must have either "prompt" or "messages".')
    text = item.get("prompt")
    if text is not None or "prompt" in item:
        if not isinstance(text, str) or not text.strip():
            raise InputFileError(f'{at}: "prompt" must be a text that is not empty.')
        messages: tuple[Mapping[str, Any], ...] = ({"role": "user", "content": text},)
    else:
        messages = _parse_messages(item["messages"], at)
    max_tokens = item.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise InputFileError(f'{at}: "max_tokens" must be a whole number of at least 1, not {max_tokens!r}.')
    for key in ("id", "category"):
        if key in item and (not isinstance(item[key], str | int) or not str(item[key]).strip()):
            raise InputFileError(f'{at}: "{key}" must be a text that is not empty.')
    return Prompt(
        id=str(item.get("id", f"line-{number}")),
        category=str(item.get("category", default_category)),
        messages=messages,
        text=text,
        max_tokens=max_tokens,
        extra={key: item[key] for key in sorted(_PASSED_ON & item.keys())},
        expected=str(item.get("expected", "")),
    )


def _parse_messages(messages: object, at: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(messages, list) or not messages:
        raise InputFileError(f'{at}: "messages" must be a list with at least one message.')
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputFileError(f'{at}: message {index + 1} must be an object with a "role" and a "content".')
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            raise InputFileError(f'{at}: message {index + 1} ({message["role"]}) has no "content".')
    return tuple(messages)


def _refuse_repeated_ids(prompts: Sequence[Prompt], where: str) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise InputFileError(f"{where} uses the id {prompt.id!r} twice.", hint="Results are paired by id.")
        seen.add(prompt.id)


@cache
def _packaged(category: str) -> tuple[Prompt, ...]:
    name = f"{category}.jsonl"
    text = resources.files("surespec.bench").joinpath("prompts", name).read_text(encoding="utf-8")
    return tuple(_parse_lines(text.split("\n"), name, default_category=category))


def _builtin(name: str) -> tuple[Prompt, ...]:
    if name in CATEGORIES:
        return _packaged(name)
    pools = [_packaged(c) for c in CATEGORIES]
    if name == "quick":
        pools = [pool[:QUICK_PER_CATEGORY] for pool in pools]
    rounds = max(len(pool) for pool in pools)
    return tuple(pool[i] for i in range(rounds) for pool in pools if i < len(pool))


def _take(pool: Sequence[Prompt], count: int) -> tuple[list[Prompt], list[str]]:
    """The first ``count`` prompts; a pool that is too small is repeated, with ``#2`` ... behind the ids."""
    taken = list(pool[:count])
    for index in range(len(pool), count):
        prompt = pool[index % len(pool)]
        taken.append(replace(prompt, id=f"{prompt.id}#{index // len(pool) + 1}"))
    if count <= len(pool):
        return taken, []
    return taken, [
        f"{count} prompts were asked for and the set has {len(pool)}, so prompts repeat: a prefix cache, or a drafter "
        "that remembers answers, makes the repeats faster than real traffic."
    ]


def _content_text(content: object) -> str:
    """The text of a message's content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def _sized(prompt: Prompt, input_len: int) -> Prompt:
    """The prompt at about ``input_len`` tokens: filler of its category in front, or its middle cut out."""
    want = input_len * CHARS_PER_TOKEN
    have = sum(len(_content_text(m.get("content"))) for m in prompt.messages)
    last = dict(prompt.messages[-1])
    content = _content_text(last.get("content"))
    if have > want:
        room = max(CHARS_PER_TOKEN, want - (have - len(content)))
        head, tail = room - room // 2, room // 2
        last["content"] = content[:head] + content[len(content) - tail :]
    else:
        last["content"] = _filler(prompt, want - have) + content
    return replace(prompt, messages=(*prompt.messages[:-1], last), text=None)


def _filler(prompt: Prompt, chars: int) -> str:
    """Exactly ``chars`` characters of other prompts of the same category, starting after this one."""
    source = _packaged(prompt.category) if prompt.category in CATEGORIES else _packaged("chat")
    texts = [_content_text(p.messages[-1].get("content")) for p in source]
    start = next((i + 1 for i, p in enumerate(source) if p.id == prompt.id.partition("#")[0]), 0)
    frame = "For context, earlier notes:\n", "\n---\n"
    room = chars - len(frame[0]) - len(frame[1])
    if room <= 0:
        return ""
    block = "\n".join(texts[start:] + texts[:start]) + "\n"
    return frame[0] + (block * (room // len(block) + 1))[:room] + frame[1]
