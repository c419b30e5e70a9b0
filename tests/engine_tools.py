"""Driving a `LocalEngine` from a test: submit, wait, collect."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from surespec.local.drafters.base import Drafter
from surespec.local.drafters.draft_model import DraftModelDrafter
from surespec.local.drafters.ngram import NgramDrafter
from surespec.local.engine import LocalEngine
from surespec.local.speculative import SpeculativeConfig
from surespec.local.types import SamplingParams, StepOutput


class Answer:
    """Collects the outputs of one request."""

    def __init__(self, engine: LocalEngine, prompt: Sequence[int], params: SamplingParams) -> None:
        self.steps: list[StepOutput] = []
        self._done: Future[None] = Future()
        self.request_id = engine.submit(prompt, params, self._take)

    def _take(self, output: StepOutput) -> None:
        self.steps.append(output)
        if output.finish_reason is not None:
            self._done.set_result(None)

    def wait(self, timeout: float = 60) -> list[int]:
        """All token ids, once the request has ended."""
        self._done.result(timeout)
        assert not self.steps[-1].error
        return [t for step in self.steps for t in step.token_ids]

    @property
    def reason(self) -> str | None:
        """Why it ended."""
        return self.steps[-1].finish_reason


def submit_together(
    engine: LocalEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Answer]:
    """Submit all requests before the engine looks at the first."""
    with engine._condition:
        return [Answer(engine, p, s) for p, s in zip(prompts, params, strict=True)]


def answer_all(
    engine: LocalEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """Submit everything at once and wait for it."""
    return [answer.wait() for answer in submit_together(engine, prompts, params)]


def mixed_prompts(n: int, vocab: int, seed: int = 1, longest: int = 40) -> list[list[int]]:
    """Random prompts of mixed length; half of them repeat themselves, so that n-grams find something."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        part = rng.integers(3, vocab, size=int(rng.integers(1, longest))).tolist()
        made.append(part * 2 if i % 2 else part)
    return made


def mixed_lengths(n: int, longest: int, seed: int = 2) -> list[SamplingParams]:
    """Greedy requests of 1 to ``longest`` tokens."""
    return [SamplingParams(max_tokens=int(m)) for m in np.random.default_rng(seed).integers(1, longest + 1, size=n)]


def ngram(k: int, max_len: int, **extra: object) -> tuple[SpeculativeConfig, Drafter]:
    """Prompt lookup of 1 to 3 tokens."""
    keys = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return SpeculativeConfig.model_validate(keys | extra), NgramDrafter(1, 3, max_len)


def draft_model(model, k: int, max_num_seqs: int, max_len: int, **extra: object) -> tuple[SpeculativeConfig, Drafter]:  # type: ignore[no-untyped-def]
    """Another model (or the target itself) as the drafter."""
    config = SpeculativeConfig.model_validate(
        {"method": "draft_model", "model": "draft", "num_speculative_tokens": k} | extra
    )
    probabilistic = config.draft_sample_method == "probabilistic"
    vocab = model.config.vocab_size
    drafter = DraftModelDrafter(model, vocab, max_num_seqs=max_num_seqs, max_len=max_len, probabilistic=probabilistic)
    return config, drafter
