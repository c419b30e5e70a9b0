"""The embedded engine as Dynamo's worker, with stand-ins for Dynamo's context and publisher (real: tests/real)."""

from __future__ import annotations

import asyncio

import pytest

from engine_tools import ngram
from fake_target import FakeTarget
from surespec.errors import ModelError
from surespec.local import dynamo_worker
from surespec.local.dynamo_worker import BLOCK_SIZE, Handler, model_folder, sampling_params
from surespec.local.engine import LocalEngine
from surespec.local.metrics import ServerMetrics


class Context:
    """Dynamo's, as far as it is used."""

    def __init__(self):
        self.stopped = asyncio.Event()

    async def async_killed_or_stopped(self):
        return await self.stopped.wait()


class Publisher:
    """Keeps the blocks that the router would know of."""

    def __init__(self):
        self.known, self.most = set(), 0

    def publish_stored(self, *, token_ids, num_block_tokens, block_hashes, parent_hash):
        assert len(token_ids) == sum(num_block_tokens) == BLOCK_SIZE * len(block_hashes)
        assert parent_hash is None or parent_hash in self.known
        self.known |= set(block_hashes)
        self.most = max(self.most, len(self.known))

    def publish_removed(self, block_hashes):
        self.known -= set(block_hashes)


class Invalid(Exception):
    """Dynamo's InvalidArgument."""


@pytest.fixture
def engine():
    target = FakeTarget()
    config, drafter = ngram(3, target.config.max_position_embeddings)
    made = LocalEngine(target, speculative=config, drafter=drafter, max_num_seqs=2)
    yield made
    made.close()


@pytest.fixture
def handler(engine):
    return Handler(engine, Publisher(), ServerMetrics("toy", engine.counters, speculating=True), invalid=Invalid)


def request(tokens, **stop):
    return {"token_ids": tokens, "stop_conditions": stop, "sampling_options": {"temperature": 0.0}}


async def collect(handler, asked, context=None):
    return [chunk async for chunk in handler.generate(asked, context or Context())]


PROMPT = [3, 4, 5, 6] * 9


def test_chunks_hold_the_greedy_tokens_usage_and_acceptance(engine, handler):
    chunks = asyncio.run(collect(handler, request(PROMPT, max_tokens=30, ignore_eos=True)))
    tokens = [token for chunk in chunks for token in chunk["token_ids"]]
    assert tokens == engine.target.greedy(PROMPT, 30, eos=-1)
    assert chunks[-1]["finish_reason"] == "length"
    assert chunks[-1]["completion_usage"] == {"prompt_tokens": 36, "completion_tokens": 30, "total_tokens": 66}
    assert all("finish_reason" not in chunk for chunk in chunks[:-1])
    told = chunks[-1]["engine_data"]
    assert told["num_speculative_tokens"] == 3
    assert 0 <= told["spec_decode"]["accepted"] <= told["spec_decode"]["drafted"]
    assert handler._publisher.most == len(PROMPT) // BLOCK_SIZE
    assert handler._publisher.known == set()


def test_a_stop_frees_the_slot_and_the_blocks(engine, handler):
    async def stopped():
        context, seen = Context(), []
        async for chunk in handler.generate(request(PROMPT, max_tokens=2000, ignore_eos=True), context):
            seen.append(chunk)
            context.stopped.set()
        return seen

    chunks = asyncio.run(stopped())
    assert sum(len(chunk["token_ids"]) for chunk in chunks) < 2000
    for _ in range(100):
        if engine.counters().running == 0:
            break
        asyncio.run(asyncio.sleep(0.02))
    assert engine.counters().running == 0
    assert handler._publisher.known == set()


def test_what_can_never_run_is_the_clients_fault(handler):
    for bad in (request([10_000_000], max_tokens=4), request(PROMPT * 2000, max_tokens=4), request([], max_tokens=4)):
        with pytest.raises(Invalid):
            asyncio.run(collect(handler, bad))
    assert handler._publisher.known == set()


def test_options_that_are_absent_or_null_have_openais_defaults():
    params = sampling_params({"stop_conditions": {"max_tokens": None}, "sampling_options": {"top_k": -1}}, 12)
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (12, 1.0, 1.0, 0)
    params = sampling_params(
        {"stop_conditions": {"stop_token_ids_hidden": [7], "stop_token_ids": [8]}, "output_options": {"logprobs": 2}}, 1
    )
    assert params.stop_token_ids == (7, 8)
    assert params.logprobs == 2


def test_logprobs_are_told_in_dynamos_form(handler):
    asked = request(PROMPT, max_tokens=4, ignore_eos=True) | {"output_options": {"logprobs": 2}}
    chunks = asyncio.run(collect(handler, asked))
    for chunk in chunks:
        assert len(chunk["log_probs"]) == len(chunk["token_ids"]) == len(chunk["top_logprobs"])
        assert all(len(top) == 2 and top[0]["rank"] == 1 for top in chunk["top_logprobs"])


def test_a_file_that_is_no_model_folder_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        model_folder(str(tmp_path / "some.gguf"))
    assert dynamo_worker.ENDPOINT == "backend.generate"
