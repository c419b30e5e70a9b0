"""Probabilities and accept rules: exact values, properties, and the distribution that comes out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import chisquare

from surespec.local import sampler

LOGITS = arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(2, 40)), elements=st.floats(-20, 20, width=32))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


@given(LOGITS, st.floats(0.05, 4), st.floats(0.01, 1), st.integers(0, 50))
def test_rows_are_distributions(logits, temperature, top_p, top_k):
    probs = sampler.probs_from_logits(logits, temperature, top_p, top_k)
    assert np.allclose(probs.sum(axis=-1), 1)
    assert (probs >= 0).all()
    for row, source in zip(probs, logits, strict=True):
        kept = row > 0
        # Nothing that was dropped is more likely than what was kept (ties may go either way).
        if not kept.all():
            assert source[kept].min() >= source[~kept].max() - 1e-4


@given(LOGITS, st.floats(0.05, 1))
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(logits, top_p):
    for row, source in zip(sampler.probs_from_logits(logits, 1.0, top_p), logits, strict=True):
        full = np.sort(softmax(source.astype(np.float64)))[::-1]
        count = int((row > 0).sum())
        assert full[:count].sum() >= top_p - 1e-9 or count == np.count_nonzero(full)
        assert full[: count - 1].sum() < top_p + 1e-9


def test_temperature_then_top_k_then_top_p():
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    top3 = np.array([0.4, 0.3, 0.2, 0]) / 0.9
    assert np.allclose(sampler.probs_from_logits(logits, 1.0, top_k=3)[0], top3)
    # 0.4 + 0.3 of 0.9 is 0.78: top_p 0.75 keeps two of the three; without top_k before it, three would stay.
    assert np.allclose(sampler.probs_from_logits(logits, 1.0, top_p=0.75, top_k=3)[0], [4 / 7, 3 / 7, 0, 0])
    assert (sampler.probs_from_logits(logits, 1.0, top_p=0.75)[0] > 0).sum() == 3
    squared = np.array([16, 9, 4, 1]) / 30
    assert np.allclose(sampler.probs_from_logits(logits, 0.5)[0], squared)


def test_top_k_keeps_ties_and_top_p_survives_a_flat_vocabulary():
    assert (sampler.probs_from_logits(np.zeros((1, 5), np.float32), 1.0, top_k=2) > 0).all()
    flat = sampler.probs_from_logits(np.zeros((1, 4000), np.float32), 1.0, top_p=0.5)
    assert (flat > 0).sum() in (2000, 2001)  # one more when the running sum rounds down


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match="positive"):
        sampler.probs_from_logits(np.zeros((1, 3), np.float32), 0.0)


@pytest.mark.parametrize(
    ("drafts", "best", "expected"),
    [
        ([], [7], (0, 7)),
        ([1, 2, 3], [1, 2, 3, 4], (3, 4)),
        ([1, 9, 3], [1, 2, 3, 4], (1, 2)),
        ([9, 2], [1, 2, 3], (0, 1)),
    ],
)
def test_greedy_keeps_the_agreeing_prefix(drafts, best, expected):
    assert sampler.accept_greedy(np.array(drafts, np.int64), np.array(best, np.int64)) == expected


def joint(p_rows, q_rows, rng, rounds, deterministic=None):
    """Counts of the first two tokens after speculative sampling with context-free p and q."""
    vocab = len(p_rows[0])
    counts = np.zeros((vocab, vocab))
    target = np.array(p_rows)
    for _ in range(rounds):
        if deterministic is None:
            ids = np.array([sampler.sample(q, rng) for q in q_rows], np.int64)
            tokens = sampler.accept_rejection(ids, np.array(q_rows), target, rng)
        else:
            tokens = sampler.accept_rejection(np.array(deterministic), None, target, rng)
        while len(tokens) < 2:  # the rest of the answer is sampled plainly
            tokens.append(sampler.sample(target[len(tokens)], rng))
        counts[tokens[0], tokens[1]] += 1
    return counts


P = [softmax(np.array([1.0, 0.2, -0.5, 0.4, -2.0])), softmax(np.array([-1.0, 0.5, 0.5, 1.4, 0.0])), np.full(5, 0.2)]
Q = [softmax(np.array([-0.5, 1.2, 0.5, 0.4, 1.0])), softmax(np.array([1.0, -0.5, 0.5, 0.4, 0.0]))]
EXPECTED = np.outer(P[0], P[1])


@pytest.mark.parametrize("deterministic", [None, [1, 0], [0, 3]])
def test_rejection_sampling_gives_the_targets_distribution(deterministic):
    counts = joint(P, Q, np.random.default_rng(5), 20000, deterministic)
    assert chisquare(counts.ravel(), EXPECTED.ravel() * counts.sum()).pvalue > 0.001


def always(draft_ids, draft_probs, target_probs, rng):
    """A wrong rule: whatever was drafted is kept."""
    return [*draft_ids.tolist(), sampler.sample(target_probs[-1], rng)]


@pytest.mark.parametrize("mistake", ["accepts always", "draws again from p"])
@pytest.mark.parametrize("deterministic", [None, [1, 0]])
def test_the_chi_square_sees_a_wrong_rule(monkeypatch, mistake, deterministic):
    if mistake == "accepts always":
        monkeypatch.setattr(sampler, "accept_rejection", always)
    else:
        monkeypatch.setattr(sampler, "residual", lambda p, draft, q: p)
    counts = joint(P, Q, np.random.default_rng(5), 20000, deterministic)
    assert chisquare(counts.ravel(), EXPECTED.ravel() * counts.sum()).pvalue < 1e-6


def test_equal_distributions_are_always_accepted():
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = np.array([sampler.sample(p, rng) for p in P[:2]])
        assert sampler.accept_rejection(ids, np.array(P[:2]), np.array(P), rng)[:2] == ids.tolist()


def test_a_draft_the_target_never_says_is_never_kept():
    rng = np.random.default_rng(0)
    target = np.array([[0.5, 0.5, 0.0]] * 2)
    drawn = {tuple(sampler.accept_rejection(np.array([2]), None, target, rng)) for _ in range(100)}
    assert drawn == {(0,), (1,)}


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_sampling_never_leaves_the_support(seed):
    rng = np.random.default_rng(seed)
    probs = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    assert sampler.sample(probs, rng) in (1, 3)


class _AlmostOne:
    """A generator at the end of its range, where the product with the total rounds up."""

    def random(self) -> float:
        return 1.0


def test_rounding_at_the_top_gives_the_last_possible_token():
    assert sampler.sample(np.array([0.3, 0.7, 0.0]), _AlmostOne()) == 1  # type: ignore[arg-type]


def test_logprobs_are_normalised_and_sorted():
    rows = np.array([[2.0, 0.0, 1.0], [0.0, 0.0, 5.0]], np.float32)
    first, second = sampler.logprobs(rows, [1, 2], top_n=2)
    assert first.token_id == 1
    assert first.logprob == pytest.approx(-np.log(np.exp([2.0, 0.0, 1.0]).sum()))
    assert [t for t, _ in first.top] == [0, 2]
    assert second.top[0] == (2, second.logprob)
    assert sampler.logprobs(rows, [1, 2], top_n=0)[0].top == ()
