"""The view model: numbers, roles and sentences, from objects made by hand."""

from __future__ import annotations

import math

import pytest
from report_samples import ARMS, CATEGORIES, RATIOS, failed_launch, kept, launch, manifest, tuning

from surespec.core import EXIT_CODES, Judgement
from surespec.report import build_view
from surespec.report.view import View


def view_of(judgement: Judgement | None = None) -> View:
    return build_view(
        judgement or kept(), tuning(), manifest=manifest(), arms=ARMS, notes={"suffix-k8": "predicted 1.02×"}
    )


def test_snapshot_of_the_table() -> None:
    rows = [
        (r.concurrency, r.metric, r.baseline, r.candidate, r.ratio, r.low, r.high, r.outcome) for r in view_of().rows
    ]
    # Geometric means of two launches: throughput (50, 51) and (71, 73) at c1; intervals come from the judgement.
    assert rows[0][2:4] == pytest.approx((math.sqrt(50 * 51), math.sqrt(71 * 73)))
    assert rows[0][4:] == (1.426, 1.37, 1.481, "better")
    assert rows[1][:2] == (1, "tpot_ms_p50")
    assert rows[1][4:] == (0.70, 0.67, 0.732, "better")
    assert rows[2][2:5] == pytest.approx((85.0, 85.0, 1.0))
    assert rows[2][5:] == (None, None, "unclear")
    assert rows[3][2:4] == pytest.approx((210.5, 223.0), rel=1e-3)
    assert rows[3][4:] == (1.059, 0.99, 1.131, "unclear")
    assert len(rows) == 6


def test_categories_are_paired_by_prompt() -> None:
    view = view_of()
    assert view.category_concurrency == 1
    assert [row.category for row in view.categories] == sorted(CATEGORIES, key=lambda c: -CATEGORIES[c])
    copy = view.categories[0]
    assert copy.prompts == 4
    assert copy.baseline_tpot_ms == pytest.approx(20.0)
    assert copy.speedup == pytest.approx(CATEGORIES["copy"])
    assert copy.low is not None and copy.high is not None and copy.low < copy.speedup < copy.high


def test_a_prompt_only_one_arm_answered_is_not_paired() -> None:
    launches = list(tuning())
    lost = launches[3].runs[0].traces[0]
    for i in (3, 4):
        runs = launches[i].runs
        traces = tuple(t.model_copy(update={"ok": t.prompt_id != lost.prompt_id}) for t in runs[0].traces)
        launches[i] = launches[i].model_copy(
            update={"runs": (runs[0].model_copy(update={"traces": traces}), *runs[1:])}
        )
    view = build_view(kept(), launches, arms=ARMS)
    assert {row.category: row.prompts for row in view.categories} == {c: 3 if c == "chat" else 4 for c in CATEGORIES}


def test_arms_in_order_with_their_results() -> None:
    arms = {arm.name: arm for arm in view_of().arms}
    assert list(arms) == ["baseline", "eagle3-k3", "ngram-k5", "draft-k2", "suffix-k8"]
    assert arms["eagle3-k3"].role == "candidate"
    assert arms["eagle3-k3"].acceptance_length == pytest.approx(1 + (60 + 33 + 18) / 100)
    assert arms["eagle3-k3"].per_position == (0.6, 0.33, 0.18)
    assert arms["ngram-k5"].speedup == pytest.approx(55 / math.sqrt(50 * 51))
    assert arms["draft-k2"].failed == 1
    assert arms["draft-k2"].result.startswith("failed: the draft model has another vocabulary")
    assert arms["suffix-k8"].result == "predicted 1.02×"
    assert arms["baseline"].speedup is None


def test_timeline_in_seconds_from_the_first_launch() -> None:
    bars = view_of().timeline
    assert [bar.start_s for bar in bars] == [0, 50, 98, 106, 142, 178]
    assert bars[2].status == "failed"
    assert bars[0].measuring_s == pytest.approx(24 * 64 / 50 + 24 * 64 / 210)


def test_launches_without_a_start_time_follow_each_other() -> None:
    launches = [launch(i, arm, 0, {1: 50.0}).model_copy(update={"started_at": ""}) for i, arm in enumerate("ab")]
    bars = build_view(None, launches).timeline
    assert bars[1].start_s == pytest.approx(bars[0].loading_s + bars[0].measuring_s)


def test_failed_requests_and_launches_are_warned_about() -> None:
    launches = list(tuning())
    run = launches[0].runs[0].model_copy(update={"failed": 2})
    launches[0] = launches[0].model_copy(update={"runs": (run, *launches[0].runs[1:])})
    warnings = build_view(kept(), launches, arms=ARMS).warnings
    assert any("2 of 24 requests failed at concurrency 1" in text for text in warnings)
    assert any("Launch 2 (draft-k2) failed" in text for text in warnings)


def test_a_run_in_which_nothing_succeeded_is_not_averaged() -> None:
    launches = list(tuning())
    zero = launches[0].runs[0].model_copy(update={"failed": 24, "throughput_tok_s": 0.0})
    launches[0] = launches[0].model_copy(update={"runs": (zero, *launches[0].runs[1:])})
    assert build_view(kept(), launches, arms=ARMS).rows[0].baseline == 51.0


@pytest.mark.parametrize("verdict", EXIT_CODES)
def test_every_verdict_has_a_badge_and_a_sentence(verdict: str) -> None:
    judgement = kept().model_copy(update={"verdict": verdict, "arm": None})
    view = view_of(judgement)
    assert view.badge
    assert view.headline.endswith(".")
    # A verdict that recommends no arm still shows which one was compared.
    assert view.candidate == "eagle3-k3"


def test_headline_names_the_effect_on_one_user_and_under_load() -> None:
    assert view_of().headline == (
        "Keep eagle3-k3: 1.43 times the tokens per second with one user and 1.06 times with 8 users at once."
    )


def test_without_a_verdict_the_view_says_so() -> None:
    view = build_view(None, ())
    assert view.status == "unfinished"
    assert view.rows == () and view.categories == () and view.arms == () and view.timeline == ()
    assert "not compared" in view.lossless_text


def test_only_failures() -> None:
    view = build_view(
        kept().model_copy(update={"verdict": "failed", "ratios": {}, "arm": None, "lossless": None}),
        [failed_launch(0, "baseline", 0, "port 8000 is in use.")],
    )
    assert view.rows == ()
    assert view.candidate is None
    assert view.arms[0].result == "failed: port 8000 is in use."


def test_categories_from_summaries_without_traces() -> None:
    from surespec.core import CategoryStats

    launches = []
    for item in tuning(with_traces=False):
        tpot = 20.0 if item.arm == "baseline" else 10.0
        stats = {"chat": CategoryStats(num_requests=7, output_tokens=70, tpot_ms_p50=tpot, acceptance=None)}
        launches.append(
            item.model_copy(update={"runs": tuple(r.model_copy(update={"by_category": stats}) for r in item.runs)})
        )
    (row,) = build_view(kept(), launches, arms=ARMS).categories
    assert (row.category, row.prompts, row.speedup, row.low) == ("chat", 7, 2.0, None)


def test_secrets_are_masked_and_nested_settings_flattened() -> None:
    view = view_of()
    assert ("api_key", "(hidden)") in view.options
    assert ("concurrency", "1, 8") in view.options
    assert ("cpu.physical_cores", "2") in view.machine
    assert "sk-very-secret" not in repr(view)


def test_the_command_that_measures_again_comes_from_the_options() -> None:
    options = {"model": "my model", "concurrency": [1, 8], "draft_model": None, "num_prompts": 36, "methods": None}
    view = build_view(None, (), manifest={"options": options})
    assert view.reproduce == "surespec tune --model 'my model' --concurrency 1,8 --num-prompts 36"


def test_ratio_of_times_is_worse_above_one() -> None:
    slow = RATIOS["c1"].model_copy(update={"tpot_ms_p50": RATIOS["c1"].throughput_tok_s})
    view = view_of(kept().model_copy(update={"ratios": {"c1": slow}}))
    assert (view.rows[0].outcome, view.rows[1].outcome) == ("better", "worse")
