"""Predictions of other k from one probe, against a simulated server whose truth is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surespec.core import Acceptance, Run
from surespec.predict import (
    FIXED_SHARE,
    break_even_tokens,
    candidate_ks,
    choose,
    expected_tokens,
    extended,
    predict,
    step_share,
)

KS = (1, 2, 3, 4, 5)
STEP_0, PER_K, REQUESTS, LENGTH = 20.0, 2.0, 10, 101


def served(k, positions, share=1.0, concurrency=1, per_k=PER_K, fixed=FIXED_SHARE):
    """A run of a server with these truths: its step costs STEP_0, and 5 * per_k more at k = 5, of which a part is there
    from k = 1 on; a share of steps has a draft."""
    cost = STEP_0 + 5 * per_k * step_share(k, 5, fixed)
    tokens = 1 + share * sum(positions[:k])
    decoded = REQUESTS * (LENGTH - 1)
    drafts = round(share * decoded / tokens)
    reached = tuple(round(drafts * p) for p in positions[:k])
    acceptance = Acceptance(
        drafts=drafts, drafted=drafts * k, accepted=sum(reached), accepted_per_position=reached
    ) if k else None  # fmt: skip
    return Run(
        concurrency=concurrency, num_requests=REQUESTS, failed=0, duration_s=1, output_tokens=REQUESTS * LENGTH,
        throughput_tok_s=1, ttft_ms_p50=1, ttft_ms_p99=1, tpot_ms_p50=cost / tokens, tpot_ms_p99=1,
        itl_ms_p50=None, itl_ms_p99=None, e2e_latency_ms_p50=1, acceptance=acceptance,
    )  # fmt: skip


positions_of = st.lists(st.floats(0.05, 1.0), min_size=5, max_size=5).map(lambda rates: chain(rates))


def chain(rates):
    """Unconditional p_i from conditional rates."""
    found, reached = [], 1.0
    for rate in rates:
        reached *= rate
        found.append(reached)
    return found


@given(positions_of, st.floats(0.2, 1.0), st.floats(0.0, 6.0))
def test_every_smaller_k_is_predicted_from_one_probe(positions, share, per_k):
    baseline, probe = served(0, positions), served(5, positions, share, per_k=per_k)
    for prediction in predict(baseline, probe, 5, (1, 2, 3, 4, 5)):
        truth = served(prediction.k, positions, share, per_k=per_k)
        assert prediction.tpot_ms == pytest.approx(truth.tpot_ms_p50, rel=0.02)
        assert prediction.speed_ratio == pytest.approx(STEP_0 / truth.tpot_ms_p50, rel=0.02)


@given(positions_of, st.floats(0.2, 1.0), st.floats(0.0, 6.0), st.floats(0.0, 0.6))
def test_the_interval_holds_the_truth_whatever_part_is_fixed(positions, share, per_k, fixed):
    baseline, probe = served(0, positions), served(5, positions, share, per_k=per_k)
    for p in predict(baseline, probe, 5, (1, 2, 3, 4, 5)):
        assert p.low <= p.speed_ratio <= p.high
        step = STEP_0 + 5 * per_k * step_share(p.k, 5, fixed)
        truth = STEP_0 * (1 + share * sum(positions[: p.k])) / step
        assert p.low * 0.98 <= truth <= p.high * 1.02


@given(positions_of, st.floats(0.0, 6.0))
def test_break_even_is_where_the_step_pays_for_itself(positions, per_k):
    baseline, probe = served(0, positions), served(5, positions, per_k=per_k)
    needed = break_even_tokens(baseline, probe)
    assert needed == pytest.approx((STEP_0 + 5 * per_k) / STEP_0, rel=0.02)
    assert break_even_tokens(baseline, probe, 0.3) == pytest.approx(1.3 * needed)
    assert break_even_tokens(baseline, baseline) is None


@given(positions_of)
def test_tokens_grow_with_k_and_stop_at_k_plus_one(positions):
    values = [expected_tokens(positions, k) for k in range(6)]
    assert values[0] == 1
    assert values == sorted(values)
    assert all(value <= k + 1 + 1e-9 for k, value in enumerate(values))


def test_known_numbers():
    assert expected_tokens([0.5, 0.25], 2) == 1.75
    assert expected_tokens([0.5, 0.25], 1, draft_share=0.5) == 1.25
    assert expected_tokens([0.5], 4) == 1.5
    assert extended([0.8, 0.4], 4) == pytest.approx((0.8, 0.4, 0.2, 0.1))
    assert extended([0.9], 3) == pytest.approx((0.9, 0.81, 0.729))
    assert extended([0.0, 0.0], 3) == (0.0, 0.0, 0.0)
    assert extended([], 3) == ()
    with pytest.raises(ValueError, match="negative"):
        expected_tokens([0.5], -1)


def test_rising_acceptance_is_not_what_is_optimised():
    """Acceptance length grows up to k = 5, but the step costs so much that k = 1 is the fastest."""
    positions = chain([0.6, 0.5, 0.5, 0.5, 0.5])
    predictions = predict(
        served(0, positions), served(5, positions, per_k=8.0, fixed=0), 5, (1, 2, 3, 4, 5), fixed_share=0.0
    )
    assert max(predictions, key=lambda p: p.tokens_per_step).k == 5
    assert choose(predictions).k == 1


def test_ties_go_to_the_smaller_k():
    positions = [0.9, 0.9, 0.14, 0.0, 0.0]
    predictions = predict(
        served(0, positions), served(5, positions, per_k=1.0, fixed=0), 5, (1, 2, 3, 4, 5), fixed_share=0.0
    )
    best = choose(predictions)
    assert best.k == 2, "k = 3 is less than 1 % faster"
    assert max(predictions, key=lambda p: p.speed_ratio).k == 3


def test_load_limits_k_where_some_k_is_safe():
    positions = chain([0.7] * 5)
    single = predict(
        served(0, positions), served(5, positions, per_k=1.0, fixed=0), 5, (1, 2, 3, 4, 5), fixed_share=0.0
    )
    load = predict(served(0, positions), served(5, positions, per_k=9.0, fixed=0), 5, KS, fixed_share=0.0)
    assert choose(single).k == 5
    limited = choose(single, load, load_floor=1.0)
    assert 1 <= limited.k < 5
    assert {p.k: p.speed_ratio for p in load}[limited.k] >= 1.0
    assert choose(single, load, load_floor=99.0).k == 5, "none is safe: the fastest for one user"
    assert choose(()) is None


def test_higher_k_only_above_the_rule_of_acceptance():
    low = Acceptance(drafts=10, drafted=50, accepted=30)
    high = Acceptance(drafts=10, drafted=50, accepted=31)
    assert candidate_ks(5, low) == (1, 2, 3, 4, 5)
    assert candidate_ks(5, high) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert candidate_ks(3, None) == (1, 2, 3)


def test_a_probe_that_tells_nothing_gives_no_prediction():
    positions = chain([0.5] * 5)
    baseline, probe = served(0, positions), served(5, positions)
    assert predict(baseline, probe.model_copy(update={"acceptance": None}), 5, (1,)) == ()
    idle = Acceptance(drafts=0, drafted=0, accepted=0)
    assert predict(baseline, probe.model_copy(update={"acceptance": idle}), 5, (1,)) == ()
    absurd = Acceptance(drafts=10, drafted=50, accepted=5000)
    assert predict(baseline, probe.model_copy(update={"acceptance": absurd}), 5, (1,)) == ()
    assert predict(baseline.model_copy(update={"tpot_ms_p50": None}), probe, 5, (1,)) == ()
