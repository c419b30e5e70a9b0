"""Speculation changes nothing about the output: greedy token for token, sampling in distribution.

Toy models of the real engine, fp32. What needs the real small model is in test_lossless_model.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy.stats import chisquare

from engine_tools import answer_all, draft_model, mixed_lengths, mixed_prompts, ngram
from surespec.local import sampler
from surespec.local.drafters.base import Drafter
from surespec.local.drafters.eagle3 import Eagle3Drafter
from surespec.local.eagle import Eagle3Head, read_aux_layers
from surespec.local.engine import LocalEngine
from surespec.local.model import TargetModel
from surespec.local.speculative import SpeculativeConfig
from surespec.local.types import SamplingParams, SeqChunk
from surespec.local.weights import load_model_files
from toy import make_eagle3_head, make_llama

VOCAB, MAX_LEN, SEQS = 320, 512, 16
Made = tuple[SpeculativeConfig, Drafter]


def rewrite(folder: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    """Change the weights of a toy model in place."""
    weights = load_file(folder / "model.safetensors")
    save_file({n: change(n, w).astype(np.float32) for n, w in weights.items()}, folder / "model.safetensors")
    return folder


def softened(folder: Path) -> Path:
    """Logits a third as far apart: the same greedy answers, but several likely tokens to sample from."""
    return rewrite(folder, lambda name, w: w * 0.35 if name == "lm_head.weight" else w)


def blurred(folder: Path, source: Path) -> Path:
    """A copy of a model with noise on its weights, and surer of itself: it agrees with the source often, not always."""
    rng = np.random.default_rng(1)
    shutil.copytree(source, folder)

    def change(name: str, w: np.ndarray) -> np.ndarray:
        noisy = w + 0.03 * w.std() * rng.standard_normal(w.shape)
        return 2.0 * noisy if name == "lm_head.weight" else noisy

    return rewrite(folder, change)


class Toys:
    """A target, a blurred copy of it, a model that is not it, and an untrained EAGLE-3 head."""

    def __init__(self, folder: Path) -> None:
        target = softened(make_llama(folder / "target", seed=3))
        head = make_eagle3_head(folder / "head", target)
        self.target = TargetModel(load_model_files(target), aux_layers=read_aux_layers(head, 4), threads=1)
        self.head = Eagle3Head(head, self.target)
        self.near = TargetModel(load_model_files(blurred(folder / "near", target)), threads=1)
        self.other = TargetModel(load_model_files(make_llama(folder / "other", layers=2, seed=4)), threads=1)

    def drafter(self, name: str, k: int, **extra: object) -> Made:
        """A fresh drafter by the name the tests use."""
        if name == "ngram":
            return ngram(k, MAX_LEN, **extra)
        if name == "eagle3":
            config = SpeculativeConfig.model_validate(
                {"method": "eagle3", "model": "head", "num_speculative_tokens": k} | extra
            )
            probabilistic = config.draft_sample_method == "probabilistic"
            drafter = Eagle3Drafter(self.head, VOCAB, max_num_seqs=SEQS, max_len=MAX_LEN, probabilistic=probabilistic)
            return config, drafter
        model = {"self": self.target, "near": self.near, "other": self.other}[name]
        return draft_model(model, k, SEQS, MAX_LEN, **extra)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("toys"))


def run(toys: Toys, made: Made | None, prompts: list[list[int]], params: list[SamplingParams], seqs: int = SEQS):
    """Answers and counters of an engine with or without a drafter."""
    config, drafter = made or (None, None)
    engine = LocalEngine(
        toys.target, speculative=config, drafter=drafter, max_num_seqs=seqs, max_model_len=MAX_LEN, kv_cache_tokens=4000
    )
    try:
        return answer_all(engine, prompts, params), engine.counters()
    finally:
        engine.close()


PROMPTS = mixed_prompts(56, VOCAB, longest=40) + mixed_prompts(6, VOCAB, seed=8, longest=180)
PARAMS = mixed_lengths(len(PROMPTS), 40)


@pytest.fixture(scope="module")
def plain(toys: Toys) -> list[list[int]]:
    """One request at a time, no speculation: the reference."""
    return run(toys, None, PROMPTS, PARAMS, seqs=1)[0]


@pytest.mark.parametrize("name", ["ngram", "self", "near", "other", "eagle3"])
@pytest.mark.parametrize(("k", "seqs"), [(1, 4), (3, 1), (4, 16), (8, 5)])
def test_greedy_output_is_the_same_token_for_token(toys, plain, name, k, seqs):
    answers, counters = run(toys, toys.drafter(name, k), PROMPTS, PARAMS, seqs)
    assert answers == plain
    assert counters.drafted > 50
    if name == "self":
        assert counters.accepted == counters.drafted


def test_plain_batches_are_the_same_as_one_at_a_time(toys, plain):
    assert run(toys, None, PROMPTS, PARAMS)[0] == plain
    assert len({tuple(a) for a in plain}) > 50, "the prompts have different answers"


@pytest.mark.parametrize("name", ["ngram", "near", "eagle3"])
def test_a_table_of_k_by_batch_size_changes_nothing(toys, plain, name):
    table = ((1, 2, 4), (3, 4, 0), (5, 8, 2), (9, 16, 1))
    made = toys.drafter(name, 4, num_speculative_tokens_per_batch_size=table)
    assert run(toys, made, PROMPTS, PARAMS)[0] == plain


SAMPLING = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, top_k=4, ignore_eos=True)
SAMPLES = 1500
COMPARED = 3  # tokens of an answer: the first comes from the prompt pass, the others from one draft of two


def expected_joint(toys: Toys, prompt: list[int], length: int = COMPARED) -> dict[tuple[int, ...], float]:
    """The target's own probability of every answer of ``length`` tokens."""
    cache = toys.target.new_cache(1, 64)
    slot = cache.alloc()

    def after(ids: list[int]) -> np.ndarray:
        out = toys.target.forward([SeqChunk(slot, 0, np.array(ids, np.int64), len(ids) - 1)], cache)
        return sampler.probs_from_logits(out.logits, SAMPLING.temperature, SAMPLING.top_p, SAMPLING.top_k)[0]

    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for answer, mass in found.items():
            row = after(prompt + list(answer))
            grown |= {(*answer, int(t)): mass * row[t] for t in np.flatnonzero(row)}
        found = grown
    return found


class UnknownAnswer(Exception):
    """A sampled answer that the target itself would never give."""


@pytest.fixture(scope="module")
def prompt(toys: Toys) -> list[int]:
    """A prompt that holds the tokens its answer is likely to begin with, so that prompt lookup finds something."""
    made = [np.random.default_rng(seed).permutation(np.arange(3, VOCAB))[:30].tolist() for seed in range(100)]
    return max(made, key=lambda p: sum(mass for answer, mass in expected_joint(toys, p, 1).items() if answer[0] in p))


def p_value(toys: Toys, made: Made, prompt: list[int]) -> float:
    """Chi-square of sampled answers against the target's own distribution; rare cells are pooled."""
    expected = expected_joint(toys, prompt)
    params = [SamplingParams(**{**_fields(SAMPLING), "seed": seed}) for seed in range(SAMPLES)]
    answers, counters = run(toys, made, [prompt] * SAMPLES, params)
    answers = [answer[:COMPARED] for answer in answers]
    assert counters.drafted > SAMPLES / 2
    if not set(map(tuple, answers)) <= expected.keys():
        raise UnknownAnswer
    counts = dict.fromkeys(expected, 0)
    for answer in answers:
        counts[tuple(answer)] += 1
    common = [c for c in expected if expected[c] * SAMPLES >= 5]
    observed = [counts[c] for c in common]
    wanted = [expected[c] * SAMPLES for c in common]
    observed.append(SAMPLES - sum(observed))
    wanted.append(SAMPLES - sum(wanted))
    if wanted[-1] < 1:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    return float(chisquare(observed, wanted).pvalue)


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__slots__}


DRAFTERS = [
    ("ngram", "greedy"),
    ("near", "greedy"),
    ("near", "probabilistic"),
    ("other", "probabilistic"),
    ("eagle3", "greedy"),
    ("eagle3", "probabilistic"),
]


def made_for_sampling(toys: Toys, name: str, method: str) -> Made:
    return toys.drafter(name, 2, **({} if name == "ngram" else {"draft_sample_method": method}))


@pytest.mark.parametrize(("name", "method"), DRAFTERS)
def test_sampling_follows_the_targets_distribution(toys, prompt, name, method):
    assert p_value(toys, made_for_sampling(toys, name, method), prompt) > 0.001


def accepts_always(draft_ids, draft_probs, target_probs, rng):
    return [*draft_ids.tolist(), sampler.sample(target_probs[-1], rng)]


def draws_again_from_p(p, draft, q):
    return p


MISTAKES: list[tuple[str, Callable[..., object]]] = [
    ("accept_rejection", accepts_always),
    ("residual", draws_again_from_p),
]


@pytest.mark.parametrize(("name", "method"), [("near", "greedy"), ("near", "probabilistic")])
@pytest.mark.parametrize(("function", "mistake"), MISTAKES)
def test_the_same_test_fails_for_a_wrong_accept_rule(toys, prompt, monkeypatch, function, mistake, name, method):
    """Teeth: with the rule made wrong on purpose the distribution is off, and the test above would fail."""
    made = made_for_sampling(toys, name, method)
    monkeypatch.setattr(sampler, function, mistake)
    try:
        assert p_value(toys, made, prompt) < 1e-6
    except UnknownAnswer:
        assert mistake is accepts_always
