"""The engine around a fake target: batching, slots, stops, limits, aborts, failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from engine_tools import Answer, answer_all, draft_model, mixed_lengths, mixed_prompts, ngram, submit_together
from fake_target import FakeTarget
from surespec.errors import ConfigError, EngineError
from surespec.local.engine import LocalEngine
from surespec.local.types import SamplingParams, StepOutput


def start(target: FakeTarget, method: str = "none", k: int = 4, draft_seed: int | None = None, **limits) -> LocalEngine:
    """An engine with one of the drafters; a draft model of seed ``draft_seed`` (None: the target itself)."""
    if method == "none":
        return LocalEngine(target, **limits)
    extra = {"num_speculative_tokens_per_batch_size": limits.pop("table", None)}
    if method == "ngram":
        config, drafter = ngram(k, target.config.max_position_embeddings, **extra)
    else:
        longest = target.config.max_position_embeddings
        draft = target if draft_seed is None else FakeTarget(target.config.vocab_size, draft_seed, longest)
        config, drafter = draft_model(draft, k, limits.get("max_num_seqs", 16), longest, **extra)
    return LocalEngine(target, speculative=config, drafter=drafter, **limits)


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget()


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Every test closes its engines."""
    yield
    assert not [t for t in threading.enumerate() if t.name == "surespec-engine"]


METHODS = [("none", None), ("ngram", None), ("draft_model", None), ("draft_model", 9)]


@pytest.mark.parametrize(("method", "draft_seed"), METHODS)
@pytest.mark.parametrize("max_num_seqs", [1, 3, 16])
def test_answers_do_not_depend_on_drafter_or_batch(target, method, draft_seed, max_num_seqs):
    wanted = mixed_prompts(20, 50)
    engine = start(target, method, draft_seed=draft_seed, max_num_seqs=max_num_seqs)
    try:
        params = mixed_lengths(20, 40)
        answers = answer_all(engine, wanted, params)
        for answer, prompt, p in zip(answers, wanted, params, strict=True):
            assert answer == target.greedy(prompt, p.max_tokens, eos=2)
        counters = engine.counters()
        assert counters.running == counters.waiting == 0
        assert counters.kv_usage == 0
        assert counters.prompt_tokens == sum(map(len, wanted))
        assert counters.generation_tokens == sum(map(len, answers))
    finally:
        engine.close()


def test_a_draft_equal_to_the_target_is_always_accepted(target):
    engine = start(target, "draft_model", k=4)
    try:
        answer = Answer(engine, [5, 6, 7], SamplingParams(max_tokens=41, ignore_eos=True))
        assert len(answer.wait()) == 41
        stats = answer.steps[-1].stats
        assert stats is not None and stats.drafted == stats.accepted == 32
        assert stats.acceptance_histogram == [0, 0, 0, 0, 8]
        assert [len(s.token_ids) for s in answer.steps] == [1] + [5] * 8
        counters = engine.counters()
        assert (counters.drafts, counters.drafted, counters.accepted, counters.per_pos) == (8, 32, 32, (8, 8, 8, 8))
        assert counters.steps == 9
    finally:
        engine.close()


def test_k_is_cut_so_that_no_token_too_many_is_computed(target):
    engine = start(target, "draft_model", k=8, max_model_len=20)
    try:
        answer = Answer(engine, [5] * 10, SamplingParams(max_tokens=100, ignore_eos=True))
        assert len(answer.wait()) == 10
        assert answer.reason == "length"
        assert max(at + n for seen in target.chunks_seen for _, at, n in seen) <= 20
    finally:
        engine.close()


def test_tokens_after_a_stop_inside_a_burst_are_dropped(target):
    plain = target.greedy([4, 4], 30)
    stop = plain[12]
    end = plain.index(stop)
    engine = start(target, "draft_model", k=8)
    try:
        answer = Answer(engine, [4, 4], SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(stop,)))
        assert answer.wait() == plain[: end + 1]
        assert answer.reason == "stop"
        assert answer.steps[-1].stats.output_tokens == end + 1
        assert engine.counters().generation_tokens == end + 1
    finally:
        engine.close()


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation_can_be_switched_while_running(target, method):
    """Off for a while and on again: the drafter has missed tokens and still drafts right."""
    engine = start(target, method, k=4)
    try:
        collected: list[StepOutput] = []
        done = threading.Event()

        def take(output: StepOutput) -> None:
            collected.append(output)
            engine.set_num_speculative_tokens(0 if 10 < len(collected) < 20 else 3)
            if output.finish_reason:
                done.set()

        engine.submit([7, 8, 9], SamplingParams(max_tokens=120, ignore_eos=True), take)
        assert done.wait(20)
        assert [t for s in collected for t in s.token_ids] == target.greedy([7, 8, 9], 120)
        assert all(len(s.token_ids) == 1 for s in collected[11:19])
        if method == "draft_model":
            assert all(len(s.token_ids) == 4 for s in collected[20:-1])
    finally:
        engine.close()


def test_k_follows_the_batch_size(target):
    engine = start(target, "draft_model", k=4, table=((1, 1, 4), (2, 2, 1), (3, 16, 0)))
    try:
        alone = Answer(engine, [3], SamplingParams(max_tokens=21, ignore_eos=True))
        alone.wait()
        assert max(len(s.token_ids) for s in alone.steps) == 5
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        three = submit_together(engine, [[3, i] for i in (4, 5, 6)], [params] * 3)
        for i, answer in zip((4, 5, 6), three, strict=True):
            assert answer.wait() == target.greedy([3, i], 20)
            assert {len(s.token_ids) for s in answer.steps} == {1}
    finally:
        engine.close()


def test_a_request_that_never_fits_is_refused_with_the_numbers(target):
    engine = start(target, kv_cache_tokens=64, max_model_len=128)
    try:
        with pytest.raises(ConfigError, match=r"70 tokens \(20 of prompt and up to 50 of answer\).*holds 64"):
            engine.submit([3] * 20, SamplingParams(max_tokens=50), lambda _: None)
        with pytest.raises(ConfigError, match="prompt has 128 tokens, but the model's context is 128"):
            engine.submit([3] * 128, SamplingParams(), lambda _: None)
        with pytest.raises(ConfigError, match="empty"):
            engine.submit([], SamplingParams(), lambda _: None)
        with pytest.raises(ConfigError, match="max_tokens is 0"):
            engine.submit([3], SamplingParams(max_tokens=0), lambda _: None)
        with pytest.raises(ConfigError, match="vocabulary ends at 49"):
            engine.submit([50], SamplingParams(max_tokens=5), lambda _: None)
    finally:
        engine.close()


def test_a_request_that_does_not_fit_now_waits(target):
    engine = start(target, kv_cache_tokens=100)
    try:
        first = Answer(engine, [3] * 10, SamplingParams(max_tokens=60, ignore_eos=True))
        second = Answer(engine, [4] * 10, SamplingParams(max_tokens=60, ignore_eos=True))
        assert second.wait() == target.greedy([4] * 10, 60)
        assert first.wait() == target.greedy([3] * 10, 60)
        assert all(len(seen) == 1 for seen in target.chunks_seen), "the two never ran side by side"
    finally:
        engine.close()


def test_long_prompts_leave_decoders_their_turns(target):
    """Two passes of a prompt never follow each other while a stream decodes."""
    decoding, both_sent = threading.Event(), threading.Event()

    class Gated(FakeTarget):
        """Stops after two passes until the long prompt is there too, however slowly this test runs."""

        def forward(self, chunks, cache):
            if len(self.chunks_seen) == 2:
                decoding.set()
                both_sent.wait(30)
            return super().forward(chunks, cache)

    big = Gated(max_len=1024)
    engine = start(big)
    try:
        first = Answer(engine, [3], SamplingParams(max_tokens=200, ignore_eos=True))
        assert decoding.wait(30)
        long = Answer(engine, list(range(3, 50)) * 17, SamplingParams(max_tokens=2))
        both_sent.set()
        long.wait()
        first.wait()
        reads = [max(n for _, _, n in seen) for seen in big.chunks_seen]
        assert max(reads) == 128
        assert not any(a > 1 and b > 1 for a, b in pairwise(reads))
    finally:
        engine.close()


@pytest.mark.parametrize(("method", "draft_seed"), METHODS)
def test_a_prompt_that_moved_between_two_decoders(method, draft_seed):
    """A short request ends, and the sequence still reading its prompt moves from the last slot into the gap."""
    target = FakeTarget(max_len=2048)
    engine = start(target, method, draft_seed=draft_seed)
    try:
        wanted = [[5, 6], [7, 8], [9, 9], list(range(3, 50)) * 25]
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (200, 3, 200, 20)]
        answers = submit_together(engine, wanted, params)
        for answer, prompt, p in zip(answers, wanted, params, strict=True):
            assert answer.wait() == target.greedy(prompt, p.max_tokens)
        middles = [seen[1] for seen in target.chunks_seen if len(seen) == 3]
        assert [1 for _, begin, count in middles if begin > 505 and begin + count < 1175], "the case came up"
    finally:
        engine.close()


def test_abort_frees_the_slot_and_says_so(target):
    engine = start(target, "draft_model", max_num_seqs=1)
    try:
        first = Answer(engine, [3], SamplingParams(max_tokens=400, ignore_eos=True))
        queued = Answer(engine, [4], SamplingParams(max_tokens=5, ignore_eos=True))
        engine.abort(first.request_id)
        first.wait()
        assert first.reason == "abort"
        assert first.steps[-1].error == ""
        assert queued.wait() == target.greedy([4], 5)
        engine.abort(12345)
        assert engine.counters().running == 0
    finally:
        engine.close()


async def test_generate_gives_the_steps_and_aborts_when_closed(target):
    engine = start(target, max_num_seqs=1)
    try:
        tokens = [t async for s in engine.generate([3, 4], SamplingParams(max_tokens=9)) for t in s.token_ids]
        assert tokens == target.greedy([3, 4], 9, eos=2)
        stream = engine.generate([3], SamplingParams(max_tokens=500, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        for _ in range(500):
            if engine.counters().running == 0:
                break
            await asyncio.sleep(0.01)
        assert engine.counters().running == 0
    finally:
        engine.close()


async def test_a_failing_model_fails_the_requests_and_the_engine(target):
    target.fail_at = 3
    engine = start(target)
    try:
        with pytest.raises(EngineError, match="RuntimeError: the fake target was told to fail"):
            async for _ in engine.generate([3, 4], SamplingParams(max_tokens=50, ignore_eos=True)):
                pass
        assert isinstance(engine.error, EngineError)
        with pytest.raises(EngineError, match="told to fail"):
            engine.submit([3], SamplingParams(), lambda _: None)
    finally:
        engine.close()


def test_a_callback_that_raises_loses_only_its_own_request(target):
    engine = start(target)
    try:

        def broken(_: StepOutput) -> None:
            raise RuntimeError("client is gone")

        engine.submit([3], SamplingParams(max_tokens=300, ignore_eos=True), broken)
        other = Answer(engine, [4], SamplingParams(max_tokens=20, ignore_eos=True))
        assert other.wait() == target.greedy([4], 20)
        assert engine.error is None
    finally:
        engine.close()


def test_close_ends_what_is_running(target):
    engine = start(target, max_num_seqs=1)
    running = Answer(engine, [3], SamplingParams(max_tokens=400, ignore_eos=True))
    waiting = Answer(engine, [3], SamplingParams(max_tokens=400, ignore_eos=True))
    engine.close()
    engine.close()
    running.wait()
    waiting.wait()
    assert waiting.reason == "abort"
    with pytest.raises(EngineError, match="closed"):
        engine.submit([3], SamplingParams(), lambda _: None)


def test_k_beyond_what_was_loaded_is_refused(target):
    engine = start(target, "ngram", k=3)
    try:
        with pytest.raises(ConfigError, match=r"started with 3: 0 \(off\) to 3"):
            engine.set_num_speculative_tokens(4)
        engine.set_num_speculative_tokens(0)
        assert engine.num_speculative_tokens == engine.counters().num_speculative_tokens == 0
    finally:
        engine.close()
    engine = start(target)
    try:
        with pytest.raises(ConfigError, match="without a speculative config"):
            engine.set_num_speculative_tokens(1)
    finally:
        engine.close()


def test_logprobs_are_the_targets_own(target):
    engine = start(target, "draft_model", k=3)
    try:
        answer = Answer(engine, [5, 6], SamplingParams(max_tokens=10, ignore_eos=True, logprobs=2, temperature=1.5))
        ids = [5, 6, *answer.wait()]
        found = [lp for step in answer.steps for lp in step.logprobs or ()]
        assert [lp.token_id for lp in found] == ids[2:]
        for i, lp in enumerate(found):
            row = target.logits(ids[: i + 2]).astype(np.float64)
            row -= row.max() + np.log(np.exp(row - row.max()).sum())
            assert lp.logprob == pytest.approx(row[lp.token_id], abs=1e-5)
            assert [t for t, _ in lp.top] == np.argsort(-row)[:2].tolist()
    finally:
        engine.close()


@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_a_seed_makes_sampling_repeatable(target, method):
    engine = start(target, method, k=3, draft_seed=4)
    try:
        params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=2.0, top_p=0.95, top_k=20, seed=11)
        first, again, other = (
            Answer(engine, [5], p).wait() for p in (params, params, SamplingParams(**{**_fields(params), "seed": 12}))
        )
        assert first == again != other
    finally:
        engine.close()


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__slots__}
