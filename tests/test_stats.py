"""Ratios and their intervals: invariances, monotony, and coverage in simulation."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surespec.core import Run, Trace
from surespec.stats import (
    ASSUMED_LAUNCH_CV,
    DECISION_ERROR,
    compare_runs,
    look_confidence,
    ratio_interval,
    sampling_error,
    usable,
)

CATEGORIES = ("chat", "code", "copy")


def make_run(tpots, *, tokens=50, ttft_ms=100.0, concurrency=1, order=None):
    """A run of one request a prompt with these TPOTs (ms); at concurrency 1 its wall time is the sum of requests."""
    traces = [
        Trace(
            prompt_id=f"p{i:03d}",
            category=CATEGORIES[i % 3],
            start_s=0.0,
            ok=True,
            output_tokens=tokens,
            ttft_ms=ttft_ms,
            tpot_ms=tpot,
            e2e_latency_ms=ttft_ms + (tokens - 1) * tpot,
        )
        for i, tpot in enumerate(tpots)
    ]
    traces = [traces[i] for i in order] if order else traces
    duration = sum(t.e2e_latency_ms for t in traces) / 1e3 / concurrency
    total = tokens * len(traces)
    return Run(
        concurrency=concurrency,
        num_requests=len(traces),
        failed=0,
        duration_s=duration,
        output_tokens=total,
        throughput_tok_s=total / duration,
        ttft_ms_p50=ttft_ms,
        ttft_ms_p99=ttft_ms,
        tpot_ms_p50=float(np.median(tpots)),
        tpot_ms_p99=max(tpots),
        itl_ms_p50=None,
        itl_ms_p99=None,
        e2e_latency_ms_p50=float(np.median([t.e2e_latency_ms for t in traces])),
        traces=tuple(traces),
    )


tpot_lists = st.lists(st.floats(5.0, 100.0), min_size=6, max_size=20)


@given(tpot_lists)
@settings(max_examples=25, deadline=None)
def test_a_run_compared_with_itself_gives_one(tpots):
    run = make_run(tpots)
    ratios = compare_runs([run], [run]).ratios
    for interval in (ratios.throughput_tok_s, ratios.tpot_ms_p50):
        assert interval.estimate == pytest.approx(1.0)
        assert interval.low < 1 < interval.high
        # nothing but the assumed launch noise: two launches of 3 % each
        assert math.log(interval.high) == pytest.approx(1.96 * ASSUMED_LAUNCH_CV * math.sqrt(2), rel=1e-3)


@given(tpot_lists, st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_the_order_of_prompts_does_not_matter(tpots, rng):
    faster = [t * rng.uniform(0.5, 1.0) for t in tpots]
    order = list(range(len(tpots)))
    rng.shuffle(order)
    straight = compare_runs([make_run(tpots)], [make_run(faster)]).ratios
    shuffled = compare_runs([make_run(tpots, order=order)], [make_run(faster)]).ratios
    assert shuffled.tpot_ms_p50 == straight.tpot_ms_p50
    assert shuffled.throughput_tok_s.high == pytest.approx(straight.throughput_tok_s.high)


@given(tpot_lists, st.floats(0.3, 0.95))
@settings(max_examples=25, deadline=None)
def test_faster_candidates_have_better_ratios_at_every_end(tpots, factor):
    base = make_run(tpots, ttft_ms=0.001)
    same = compare_runs([base], [base]).ratios
    faster = compare_runs([base], [make_run([t * factor for t in tpots], ttft_ms=0.001)]).ratios
    assert faster.tpot_ms_p50.estimate == pytest.approx(factor)
    assert faster.tpot_ms_p50.high < same.tpot_ms_p50.high
    assert faster.throughput_tok_s.estimate == pytest.approx(1 / factor, rel=1e-3)
    assert faster.throughput_tok_s.low > same.throughput_tok_s.low


def test_pairing_removes_what_prompts_have_in_common():
    rng = random.Random(1)
    tpots = [rng.uniform(10, 60) for _ in range(18)]
    even = sampling_error([make_run(tpots)], [make_run([0.7 * t for t in tpots])])
    uneven = sampling_error([make_run(tpots)], [make_run([t * rng.choice((0.4, 1.0)) for t in tpots])])
    assert even.tpot == pytest.approx(0.0, abs=1e-9)
    assert uneven.tpot > 0.05
    assert even.pairs == uneven.pairs == 18


def test_a_prompt_that_repeats_is_one_prompt():
    run = make_run([10.0, 20.0, 30.0, 40.0, 50.0, 60.0])
    renamed = [t.model_copy(update={"prompt_id": f"p{i % 3}" + ("#2" if i > 2 else "")}) for i, t in
               enumerate(run.traces)]  # fmt: skip
    assert sampling_error([run], [run]).pairs == 6
    repeated = run.model_copy(update={"traces": tuple(renamed)})
    assert sampling_error([repeated], [repeated]).pairs == 3


def test_an_interval_is_never_narrower_than_the_prompts_alone_allow():
    alone = ratio_interval([0.0], [0.3], sampling_se=0.1, sampling_df=20, launch_cv=0.0)
    launches = ratio_interval([0.0, 0.0, 0.0], [0.3, 0.3, 0.3], sampling_se=0.1, sampling_df=20)
    noisy = ratio_interval([0.0, 0.05, -0.05], [0.3, 0.35, 0.25], sampling_se=0.1, sampling_df=20)
    assert launches == alone
    assert noisy.low < launches.low
    assert noisy.high > launches.high


def test_assumptions_are_said_and_go_away_with_launches():
    run = make_run([20.0] * 6)
    one = compare_runs([run], [run])
    assert "3%" in one.assumptions[0]
    assert "each arm" in one.assumptions[0]
    assert "the candidate" in compare_runs([run, run], [run]).assumptions[0]
    assert compare_runs([run, run], [run, run]).assumptions == ()
    bare = run.model_copy(update={"traces": ()})
    without = compare_runs([bare], [bare])
    assert "paired by prompt" in without.assumptions[1]
    assert without.ratios.throughput_tok_s.high > one.ratios.throughput_tok_s.high
    assert without.paired_prompts == 0


def test_one_launch_uses_the_other_arms_spread_when_it_is_larger_than_assumed():
    calm = ratio_interval([0.0, 0.01], [0.2], sampling_se=0.0, sampling_df=None)
    wild = ratio_interval([0.0, 0.3], [0.2], sampling_se=0.0, sampling_df=None)
    assert wild.high / wild.low > 2 * calm.high / calm.low


def test_runs_that_measured_nothing_are_refused():
    run = make_run([20.0] * 6)
    dead = run.model_copy(update={"throughput_tok_s": 0.0})
    single_token = run.model_copy(update={"tpot_ms_p50": None})
    assert not usable(dead)
    assert not usable(single_token)
    with pytest.raises(ValueError, match="throughput"):
        compare_runs([run], [dead])
    with pytest.raises(ValueError, match="at least one run"):
        compare_runs([], [run])


@pytest.mark.parametrize("launches", [1, 2, 3])
def test_intervals_cover_the_truth_at_the_nominal_rate(launches):
    """Launch noise of 3 % and prompts of three kinds with their own speed-up; truth is the population's ratio."""
    rng = np.random.default_rng(7)
    hits, trials, per_kind = 0, 300, 8
    gains = (0.9, 0.7, 0.5)
    for _ in range(trials):
        base_tpot = 20 * np.exp(rng.normal(0, 0.1, 3 * per_kind))
        gain = np.tile(gains, per_kind) * np.exp(rng.normal(0, 0.1, 3 * per_kind))
        base = [make_run(list(base_tpot * math.exp(rng.normal(0, 0.03)))) for _ in range(launches)]
        cand = [make_run(list(base_tpot * gain * math.exp(rng.normal(0, 0.03)))) for _ in range(launches)]
        interval = compare_runs(base, cand).ratios.throughput_tok_s
        hits += interval.low <= TRUTH <= interval.high
    assert 0.92 <= hits / trials <= 0.995


def _truth():
    """The throughput ratio over very many prompts."""
    rng = np.random.default_rng(0)
    tpot = 20 * np.exp(rng.normal(0, 0.1, 300_000))
    gain = np.tile((0.9, 0.7, 0.5), 100_000) * np.exp(rng.normal(0, 0.1, 300_000))
    return float((100 + 49 * tpot).sum() / (100 + 49 * tpot * gain).sum())


TRUTH = _truth()


@given(st.integers(2, 8), st.integers(2, 8))
def test_all_looks_together_spend_the_error_once(most, launches):
    spent = sum(1 - look_confidence(n, most) for n in range(2, most + 1))
    assert spent == pytest.approx(DECISION_ERROR)
    assert 1 - DECISION_ERROR <= look_confidence(launches, most) < 1


def test_early_looks_spend_little():
    errors = [1 - look_confidence(n, 6) for n in range(3, 7)]
    assert errors == sorted(errors)
    assert 1 - look_confidence(2, 6) < 0.01


@pytest.mark.parametrize("launches", [2, 3])
@pytest.mark.parametrize("cv", [0.01, 0.06])
def test_few_launches_cover_at_the_nominal_rate(launches, cv):
    """A bootstrap over two or three launches would cover far less."""
    rng = np.random.default_rng(launches)
    truth, count, inside = math.log(1.3), 4000, 0
    for _ in range(count):
        base, cand = rng.normal(0, cv, launches), rng.normal(truth, cv, launches)
        interval = ratio_interval(list(base), list(cand), sampling_se=0.0, sampling_df=None)
        inside += interval.low <= 1.3 <= interval.high
    assert inside / count == pytest.approx(0.95, abs=0.02)


@given(tpot_lists, st.floats(1.02, 2.0))
@settings(max_examples=20, deadline=None)
def test_more_launches_are_foreseen_to_tell_more(tpots, factor):
    base, cand = [make_run(tpots)] * 2, [make_run([t / factor for t in tpots])] * 2
    compared = compare_runs(base, cand)
    few, many = compared.foreseen(2, 0.95), compared.foreseen(12, 0.95)
    assert few.throughput_tok_s.low <= many.throughput_tok_s.low <= many.throughput_tok_s.high
    assert many.throughput_tok_s.estimate == compared.ratios.throughput_tok_s.estimate
