"""A fault in the output is told from the baseline's own noise."""

import pytest

from surespec.core import Launch, Run, Trace
from surespec.lossless import compare_texts, first_divergence, lossy_settings


def make_launch(index, texts, arm="baseline", concurrency=1):
    traces = tuple(
        Trace(prompt_id=f"p{i:02d}", category="chat", start_s=0, ok=True, output_tokens=9, text=text)
        for i, text in enumerate(texts)
    )
    run = Run(
        concurrency=concurrency, num_requests=len(texts), failed=0, duration_s=1, output_tokens=9, throughput_tok_s=9,
        ttft_ms_p50=1, ttft_ms_p99=1, tpot_ms_p50=1, tpot_ms_p99=1, itl_ms_p50=1, itl_ms_p99=1, e2e_latency_ms_p50=1,
        traces=traces,
    )  # fmt: skip
    return Launch(index=index, arm=arm, status="ok", started_at="", runs=(run,))


SAME = [f"the answer to question {i}" for i in range(20)]


def altered(count, mark="!"):
    return [text[:10] + mark + text[11:] if i < count else text for i, text in enumerate(SAME)]


@pytest.mark.parametrize(
    ("a", "b", "place"), [("abc", "abc", None), ("abc", "abd", 2), ("abc", "ab", 2), ("", "x", 0), ("ä", "a", 0)]
)
def test_first_divergence(a, b, place):
    assert first_divergence(a, b) == place
    assert first_divergence(b, a) == place


def test_equal_texts_are_lossless_even_without_a_noise_floor():
    report = compare_texts([make_launch(0, SAME)], [make_launch(1, SAME)])
    assert report.lossless is True
    assert report.compared == 20
    assert "All 20" in report.detail


def test_many_differences_over_a_quiet_baseline_are_a_fault():
    baseline = [make_launch(0, SAME), make_launch(3, SAME)]
    report = compare_texts(baseline, [make_launch(1, altered(9)), make_launch(2, SAME)])
    assert report.lossless is False
    assert report.differing == 9
    assert report.divergences[0].position == 10
    assert "more than rounding" in report.detail


def test_a_few_differences_cannot_be_told_from_ties():
    report = compare_texts([make_launch(0, SAME), make_launch(2, SAME)], [make_launch(1, altered(2))])
    assert report.lossless is None
    assert "too few" in report.detail


def test_differences_within_the_baselines_own_are_its_noise():
    baseline = [make_launch(0, SAME), make_launch(2, altered(6, "?"))]
    report = compare_texts(baseline, [make_launch(1, altered(6))])
    assert report.lossless is True
    assert report.baseline_differing == 6
    assert "own noise" in report.detail


def test_other_concurrencies_of_the_baseline_count_as_its_noise():
    baseline = [make_launch(0, SAME), make_launch(0, altered(6), concurrency=8)]
    report = compare_texts(baseline, [make_launch(1, altered(5, "?"))])
    assert report.lossless is True


def test_one_baseline_run_cannot_show_a_fault():
    report = compare_texts([make_launch(0, SAME)], [make_launch(1, altered(20))])
    assert report.lossless is None
    assert "no second baseline" in report.detail


def test_a_fault_only_under_load_is_found():
    baseline = [make_launch(0, SAME), make_launch(0, SAME, concurrency=8)]
    candidate = [make_launch(1, SAME), make_launch(1, altered(12), concurrency=8)]
    report = compare_texts(baseline, candidate)
    assert report.lossless is False
    assert {d.concurrency for d in report.divergences} == {8}


def test_sampled_or_missing_texts_are_not_compared():
    launches = [make_launch(0, SAME)]
    assert "sampled" in compare_texts(launches, launches, temperature=0.7).detail
    assert compare_texts(launches, [make_launch(1, [""] * 20)]).lossless is None
    failed = launches[0].model_copy(update={"status": "failed"})
    assert compare_texts([failed], launches).lossless is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "eagle3", "rejection_sample_method": "synthetic"}, "rejection_sample_method synthetic is lossy"),
        ({"rejection_sample_method": "standard"}, ""),
        ({"fly_window_size": 6}, "fly_window_size 6 is lossy"),
        ({"--speculative-accept-threshold-single": "0.6"}, "threshold-single 0.6 is lossy"),
        ({"--speculative-accept-threshold-single": "1.0"}, ""),
        ({"--speculative-accept-threshold-acc": "$X"}, ""),
        ({"use_relaxed_acceptance_for_thinking": True}, "relaxed"),
        ({}, ""),
    ],
)
def test_lossy_settings_are_named(settings, said):
    found = lossy_settings(settings)
    assert bool(found) == bool(said)
    assert said in " ".join(found)
