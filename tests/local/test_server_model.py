"""The server with the real small model: texts do not depend on streaming, on k, or on who else is served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serving import AppInThread
from surespec.fetch import resolve_model
from surespec.local.engine import build_engine

PROMPTS = (
    "Say good morning in Chinese, Arabic, Hindi and Thai, and add some emojis.",
    "Repeat this line three times: the quick brown fox jumps over the lazy dog.",
    "List the numbers from one to ten as JSON.",
)


@pytest.fixture(scope="module")
def server() -> Iterator[AppInThread]:
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    engine, tokenizer = build_engine(resolve_model("smollm2-135m"), speculative_config=config, max_num_seqs=4)
    with AppInThread(engine, tokenizer) as running:
        yield running
    engine.close()


@pytest.mark.model
async def test_streaming_speculation_and_company_change_no_text(server: AppInThread) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        async def whole(prompt: str) -> str:
            messages: list[Any] = [{"role": "user", "content": prompt}]
            made = await client.chat.completions.create(model="toy", messages=messages, temperature=0, max_tokens=48)
            return made.choices[0].message.content or ""

        async def streamed(prompt: str) -> str:
            messages: list[Any] = [{"role": "user", "content": prompt}]
            chunks = await client.chat.completions.create(
                model="toy", messages=messages, temperature=0, max_tokens=48, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        server.api.engine.set_num_speculative_tokens(0)
        plain = [await whole(prompt) for prompt in PROMPTS]
        server.api.engine.set_num_speculative_tokens(4)
        assert all(plain)
        assert list(await asyncio.gather(*map(streamed, PROMPTS))) == plain
        assert server.api.engine.counters().accepted > 0
