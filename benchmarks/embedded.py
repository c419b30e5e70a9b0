"""The embedded engine, measured inside this process: decoding speed, cost of verifying, gain of drafting."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from bound import BareProducts, in_turns_ms
from surespec.bench.workload import load_prompts
from surespec.local.engine import LocalEngine, build_engine
from surespec.local.model import TargetModel
from surespec.local.tokenizer import Tokenizer
from surespec.local.types import SamplingParams, SeqChunk, StepOutput
from surespec.local.weights import ModelFiles

CONTEXT = 300  # tokens in the cache when a step's cost is measured
PROMPT = 256  # tokens of a prompt that is read at once
STREAMS = 8


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    prompts: int
    max_tokens: int
    step_repeats: int


@dataclass(frozen=True)
class Answer:
    """One request: its tokens and when each step's tokens came, as (seconds, tokens), with the start in front."""

    token_ids: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    start: float

    @property
    def decoding(self) -> tuple[int, float]:
        """Tokens after the first step's, and the seconds they took."""
        return sum(n for _, n in self.arrivals[1:]), self.arrivals[-1][0] - self.arrivals[0][0]


def ask(engine: LocalEngine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Answer]:
    """Send all prompts at once and wait for every answer."""
    waiting = [_Collector() for _ in prompts]
    start = time.perf_counter()
    for prompt, collector in zip(prompts, waiting, strict=True):
        engine.submit(prompt, params, collector)
    return [collector.answer(start) for collector in waiting]


class _Collector:
    """The callback of one request."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._arrivals: list[tuple[float, int]] = []
        self._done = threading.Event()

    def __call__(self, output: StepOutput) -> None:
        if output.token_ids:
            self._arrivals.append((time.perf_counter(), len(output.token_ids)))
            self._ids.extend(output.token_ids)
        if output.finish_reason is not None:
            self._done.set()

    def answer(self, start: float) -> Answer:
        self._done.wait()
        if not self._arrivals:
            raise RuntimeError("the engine ended a request without a token")
        return Answer(tuple(self._ids), tuple(self._arrivals), start)


def one_stream_tok_s(engine: LocalEngine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> float:
    """Tokens per second of decoding, one request at a time."""
    answers = [ask(engine, [prompt], params)[0] for prompt in prompts]
    return _decoding_tok_s(answers)


def many_streams_tok_s(engine: LocalEngine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> float:
    """Tokens per second of all streams together while every one of them decodes."""
    answers = ask(engine, prompts, params)
    begin = max(answer.arrivals[0][0] for answer in answers)
    end = min(answer.arrivals[-1][0] for answer in answers)
    tokens = sum(n for answer in answers for at, n in answer.arrivals if begin < at <= end)
    return tokens / (end - begin)


def prompt_ids(tokenizer: Tokenizer, category: str, count: int) -> list[list[int]]:
    """The first prompts of a built-in set as token ids, repeated when the set is shorter."""
    pool = [
        tokenizer.encode(tokenizer.apply_chat_template([dict(m) for m in prompt.messages], add_generation_prompt=True))
        for prompt in load_prompts(category)
    ]
    return [pool[i % len(pool)] for i in range(count)]


def against_bound(model: str, files: ModelFiles, precision: str, threads: int, effort: Effort) -> dict[str, Any]:
    """Plain decoding beside the bare products, in turns; and the cost of verifying 5 tokens over 1."""
    bare = BareProducts(files, precision, threads)
    engine, tokenizer = build_engine(model, precision=precision, threads=threads)
    params = SamplingParams(max_tokens=effort.max_tokens, ignore_eos=True)
    prompts = prompt_ids(tokenizer, "chat", STREAMS)
    alike = [prompts[i % 4] for i in range(STREAMS)]  # 42 to 101 tokens; one of all eight has 447
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    def turn(name: str, asked: Sequence[Sequence[int]]) -> None:
        """The bound before and after the engine, so that a slow minute of the machine meets both."""
        streams = len(asked)
        before = bare.step_ms(streams, effort.step_repeats)
        speed = (one_stream_tok_s if streams == 1 else many_streams_tok_s)(engine, asked, params)
        bound = 2e3 * streams / (before + bare.step_ms(streams, effort.step_repeats))
        note(f"bound_tok_s_{name}", bound)
        note(f"engine_tok_s_{name}", speed)
        note(f"share_{name}", speed / bound)

    with contextlib.closing(engine):
        ask(engine, prompts[:1], SamplingParams(max_tokens=8))
        for _ in range(effort.rounds):
            for prompt in prompts[: effort.prompts]:
                turn("1", [prompt])
            turn("8", prompts)
            turn("8_alike", alike)
        step = _step_costs(engine.target, effort) | _prompt_costs(engine.target, bare, effort)
    widths = in_turns_ms({n: partial(bare.step, n) for n in (1, 5)}, effort.rounds * effort.step_repeats)
    step["bound_verify_ratio"] = widths[5] / widths[1]
    return {name: median(values) for name, values in found.items()} | step


def plain_tok_s(model: str, precision: str, threads: int, effort: Effort) -> dict[str, float]:
    """Decoding speed without speculation: {"1": tok/s of one stream, "8": of eight together}, medians of the rounds."""
    engine, tokenizer = build_engine(model, precision=precision, threads=threads)
    params = SamplingParams(max_tokens=effort.max_tokens, ignore_eos=True)
    prompts = prompt_ids(tokenizer, "chat", STREAMS)
    with contextlib.closing(engine):
        ask(engine, prompts[:1], SamplingParams(max_tokens=8))
        single = [one_stream_tok_s(engine, prompts[: effort.prompts], params) for _ in range(effort.rounds)]
        many = [many_streams_tok_s(engine, prompts, params) for _ in range(effort.rounds)]
    return {"1": median(single), "8": median(many)}


def _step_costs(target: TargetModel, effort: Effort) -> dict[str, float]:
    """Milliseconds of a forward pass for 1 and for 5 tokens at the same context, in turns, and their ratio."""
    cache = target.new_cache(max_slots=1, max_len=CONTEXT + 16)
    slot = cache.alloc()
    rng = np.random.default_rng(0)
    ids = rng.integers(0, target.config.vocab_size, CONTEXT + 5)
    target.forward([SeqChunk(slot, 0, ids[:CONTEXT], CONTEXT)], cache)
    chunks = {n: [SeqChunk(slot, CONTEXT, ids[CONTEXT : CONTEXT + n], 0)] for n in (1, 5)}
    calls = {n: partial(target.forward, chunk, cache) for n, chunk in chunks.items()}
    times = in_turns_ms(calls, effort.rounds * effort.step_repeats)
    return {"step_ms_1": times[1], "step_ms_5": times[5], "verify_ratio": times[5] / times[1]}


def _prompt_costs(target: TargetModel, bare: BareProducts, effort: Effort) -> dict[str, float]:
    """Milliseconds of reading a prompt of ``PROMPT`` tokens into an empty cache, and its bare products, in turns."""
    cache = target.new_cache(max_slots=1, max_len=PROMPT)
    ids = np.random.default_rng(0).integers(0, target.config.vocab_size, PROMPT)
    chunk = [SeqChunk(cache.alloc(), 0, ids, PROMPT - 1)]
    times = in_turns_ms(
        {0: partial(bare.prompt, PROMPT), 1: partial(target.forward, chunk, cache)}, effort.step_repeats
    )
    return {"prompt_ms": times[1], "bound_prompt_ms": times[0], "share_prompt": times[0] / times[1]}


def speculation(
    model: str, precision: str, threads: int, effort: Effort, config: dict[str, Any], category: str, ks: Sequence[int]
) -> dict[str, Any]:
    """Speculating against plain decoding, in turns, at every k of ``ks``.

    ``config`` gets the largest k; the smaller ones are set while the engine runs. Plain decoding is measured before and
    after each round over the ks. Gains are medians over the rounds of speculating / plain: ``decoding`` leaves the
    prompt's time out, ``whole`` is all tokens over all time.
    """
    plain, tokenizer = build_engine(model, precision=precision, threads=threads)
    largest = {**config, "num_speculative_tokens": max(ks)}
    prompts = prompt_ids(tokenizer, category, effort.prompts)
    params = SamplingParams(max_tokens=effort.max_tokens)
    found: dict[int, list[_Turn]] = {k: [] for k in ks}
    references: list[_Turn] = []
    with contextlib.ExitStack() as stack:
        stack.callback(plain.close)
        drafting, _ = build_engine(model, precision=precision, threads=threads, speculative_config=largest)
        stack.callback(drafting.close)
        for engine in (plain, drafting):
            ask(engine, prompts[:1], SamplingParams(max_tokens=8))
        references.append(_turn(plain, prompts, params))
        for i in range(effort.rounds):
            for k in ks if i % 2 == 0 else reversed(ks):
                drafting.set_num_speculative_tokens(k)
                found[k].append(_turn(drafting, prompts, params))
            references.append(_turn(plain, prompts, params))
    by_k = {k: _gain(turns, references) for k, turns in found.items()}
    same = {turn.token_ids for turns in found.values() for turn in turns} == {turn.token_ids for turn in references}
    best = max(by_k, key=lambda k: by_k[k]["decoding"])
    return {"category": category, "best_k": best, "by_k": by_k, "same_tokens": same, "prompts": len(prompts)}


@dataclass(frozen=True)
class _Turn:
    """All prompts once on one engine: speeds in tok/s, the tokens, and the acceptance length."""

    decoding: float
    whole: float
    token_ids: tuple[tuple[int, ...], ...]
    acceptance_length: float


def _turn(engine: LocalEngine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> _Turn:
    before = engine.counters()
    answers = [ask(engine, [prompt], params)[0] for prompt in prompts]
    after = engine.counters()
    drafts = after.drafts - before.drafts
    return _Turn(
        decoding=_decoding_tok_s(answers),
        whole=sum(len(a.token_ids) for a in answers) / sum(a.arrivals[-1][0] - a.start for a in answers),
        token_ids=tuple(a.token_ids for a in answers),
        acceptance_length=1.0 + (after.accepted - before.accepted) / drafts if drafts else 1.0,
    )


def _gain(turns: Sequence[_Turn], references: Sequence[_Turn]) -> dict[str, float]:
    """Medians over the rounds; round i is compared with the mean of the plain turns around it."""
    around = list(pairwise(references))
    return {
        "decoding": median(2 * t.decoding / (a.decoding + b.decoding) for t, (a, b) in zip(turns, around, strict=True)),
        "whole": median(2 * t.whole / (a.whole + b.whole) for t, (a, b) in zip(turns, around, strict=True)),
        "acceptance_length": median(t.acceptance_length for t in turns),
    }


def _decoding_tok_s(answers: Sequence[Answer]) -> float:
    return sum(a.decoding[0] for a in answers) / max(sum(a.decoding[1] for a in answers), 1e-9)
