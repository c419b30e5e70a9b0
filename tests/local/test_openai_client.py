"""The official ``openai`` client, unchanged, against the server on a toy model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serving import AppInThread, FaultyEngine, wait_for
from surespec.local.engine import LocalEngine, build_engine
from surespec.local.tokenizer import Tokenizer
from toy import make_llama

MESSAGES: list[Any] = [{"role": "user", "content": "one two three one two three one two"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def engine_and_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalEngine, Tokenizer]]:
    engine, tokenizer = build_engine(
        make_llama(tmp_path_factory.mktemp("toy")),
        precision="fp32",
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        max_num_seqs=4,
    )
    yield engine, tokenizer
    engine.close()


@pytest.fixture(scope="module")
def server(engine_and_tokenizer: tuple[LocalEngine, Tokenizer]) -> Iterator[AppInThread]:
    with AppInThread(*engine_and_tokenizer, api_key="key") as running:
        yield running


@pytest.fixture
def client(server: AppInThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "surespec"


def test_chat_streamed_with_usage_equals_chat_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="toy", messages=MESSAGES, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model="toy", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None and whole.usage.completion_tokens == 16
    assert len({chunk.id for chunk in chunks}) == 1 and whole.model == "toy"
    spec = (whole.model_extra or {})["metrics"]["speculative_decoding"]
    assert spec == (chunks[-1].model_extra or {})["metrics"]["speculative_decoding"]


def test_without_include_usage_there_is_no_usage_chunk(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="toy", messages=MESSAGES, stream=True, **GREEDY))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_text_parts_and_the_newer_limit(client: openai.OpenAI) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "one two"}]}]
    plain: list[Any] = [{"role": "user", "content": "one two"}]
    made = [
        client.chat.completions.create(model="toy", messages=m, temperature=0, max_completion_tokens=5, seed=1)
        for m in (parts, plain)
    ]
    assert made[0].choices[0].message.content == made[1].choices[0].message.content
    assert made[0].usage == made[1].usage


def test_completions_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="toy", prompt="one two three", **GREEDY)
    chunks = list(client.completions.create(model="toy", prompt="one two three", stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_chat_logprobs(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="toy", messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    assert len(content) == 16
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.bytes == list(entry.token.encode())
        assert entry.logprob == pytest.approx(max(top.logprob for top in entry.top_logprobs))
    streamed = [
        entry
        for chunk in client.chat.completions.create(
            model="toy", messages=MESSAGES, logprobs=True, top_logprobs=3, stream=True, **GREEDY
        )
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="toy", prompt="one two three", logprobs=2, **GREEDY)
    shown = whole.choices[0].logprobs
    assert shown is not None and len(shown.tokens or []) == len(shown.token_logprobs or []) == 16


def test_stop(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(model="toy", messages=MESSAGES, **GREEDY).choices[0].message.content or ""
    stop = text[4:7]
    cut = client.chat.completions.create(model="toy", messages=MESSAGES, stop=[stop], **GREEDY)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage is not None and cut.usage.completion_tokens < 16


def test_errors_become_the_clients_own(server: AppInThread, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="presence_penalty is not supported") as refusal:
        client.chat.completions.create(model="toy", messages=MESSAGES, presence_penalty=1)
    assert refusal.value.param == "presence_penalty"
    with pytest.raises(openai.BadRequestError, match="json_object"):
        client.chat.completions.create(model="toy", messages=MESSAGES, response_format={"type": "json_object"})
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="toy", prompt="word " * 600)
    assert too_long.value.code == "context_length_exceeded"
    with openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as stranger:  # noqa: SIM117
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_a_failure_midway_is_raised(engine_and_tokenizer: tuple[LocalEngine, Tokenizer]) -> None:
    with (
        AppInThread(FaultyEngine([[100]], "die"), engine_and_tokenizer[1]) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="The embedded engine failed"):
            list(stream)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="toy", messages=MESSAGES)


def test_closing_a_stream_frees_its_slot(server: AppInThread, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="toy", messages=MESSAGES, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_for(lambda: server.api.engine.counters().running == 0, "the slot of the closed stream")


async def test_eight_at_once_get_what_each_gets_alone(server: AppInThread) -> None:
    """More requests than slots (4): the others wait, and batching changes no greedy text."""
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0) as client:

        async def ask(number: int) -> str | None:
            messages: list[Any] = [{"role": "user", "content": f"one two three {number} one two three"}]
            answer = await client.chat.completions.create(model="toy", messages=messages, **GREEDY)
            assert answer.usage is not None and answer.usage.completion_tokens == 16
            return answer.choices[0].message.content

        alone = [await ask(number) for number in range(8)]
        assert await asyncio.gather(*(ask(number) for number in range(8))) == alone
        assert len(set(alone)) > 1
