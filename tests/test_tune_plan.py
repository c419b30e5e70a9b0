"""Names of arms, forecasts, and which arm comes next."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surespec.core import BASELINE, Launch, Run
from surespec.engines.pace import Pace
from surespec.rules import policy
from surespec.tune_plan import TuneOptions, launch_seconds, make_arm, named_arm, plan_tune, spoken_duration, with_k
from surespec.tune_steps import Goal, History, next_arm

NGRAM = make_arm("ngram", 5)
PROBES = (make_arm("eagle3", 5, "head"), make_arm("draft_model", 4, "small"), NGRAM)


@given(st.sampled_from(PROBES), st.integers(1, 8), st.booleans())
def test_an_arm_is_found_again_by_its_name(probe, k, alone):
    arm = with_k(probe, k, alone=alone)
    assert named_arm(PROBES, arm.name) == arm
    assert arm.speculative_config["num_speculative_tokens"] == k
    assert arm.speculative_config["method"] == arm.method == probe.method


@pytest.mark.parametrize("name", ["baseline", "suffix-k3", "ngram", "ngram-k", "ngram-k3-other"])
def test_other_names_are_no_arms(name):
    assert named_arm(PROBES, name) is None


def test_the_embedded_engine_takes_every_config():
    from surespec.local.speculative import parse_speculative_config

    for arm in (*PROBES, with_k(NGRAM, 8, alone=True)):
        config = parse_speculative_config(arm.speculative_config)
        assert config.num_speculative_tokens == arm.num_speculative_tokens
    assert parse_speculative_config(with_k(NGRAM, 8, alone=True).speculative_config).k_for_batch(2) == 0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 seconds"), (41.4, "41 seconds"), (400, "7 minutes"), (4800, "1 h 20 min")]
)
def test_spoken_duration(seconds, words):
    assert spoken_duration(seconds) == words


def test_forecasts_grow_with_the_work_and_keep_to_the_budget(tmp_path):
    assert (
        launch_seconds(Pace(7, 20), 54, 64, (1,))
        > launch_seconds(Pace(7, 20), 27, 64, (1,))
        > launch_seconds(Pace(6, 10), 27, 64, (1,))
    )
    assert launch_seconds(Pace(7, 20), 27, 64, (1, 8)) > launch_seconds(Pace(7, 20), 27, 64, (1,))
    plan = plan_tune(TuneOptions(out=tmp_path, budget_s=30))
    assert plan.expected_s == 30
    assert "30 seconds" in plan.summary()


def test_a_budget_that_is_too_short_is_said_with_one_that_is_not(tmp_path):
    short = plan_tune(TuneOptions(out=tmp_path, budget_s=30))
    said = re.search(r"--budget (\d+)m", short.summary())
    assert said is not None
    enough = plan_tune(TuneOptions(out=tmp_path, budget_s=60 * int(said[1])))
    assert "--budget" not in enough.summary()
    assert enough.expected_s == enough.needed_s == short.needed_s


def test_the_default_run_is_a_matter_of_minutes(tmp_path):
    plan = plan_tune(TuneOptions(out=tmp_path, eagle3_head="head"))
    assert 120 < plan.expected_s <= 420


def test_fewer_prompts_than_the_default_are_all_sent_once(tmp_path):
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert plan_tune(TuneOptions(out=tmp_path, prompts=str(prompts))).num_prompts == 2


def make_launch(index, arm, speed, status="ok"):
    run = Run(
        concurrency=1, num_requests=9, failed=0, duration_s=9, output_tokens=90, throughput_tok_s=speed, ttft_ms_p50=1,
        ttft_ms_p99=1, tpot_ms_p50=1000 / speed, tpot_ms_p99=1, itl_ms_p50=1, itl_ms_p99=1, e2e_latency_ms_p50=1,
    )  # fmt: skip
    return Launch(index=index, arm=arm, status=status, started_at="", runs=(run,) if status == "ok" else ())


def order(goal, speed_of, limit=20):
    """The arms that would be launched one after the other."""
    launches = []
    while (arm := next_arm(goal, History(tuple(launches)))) is not None and len(launches) < limit:
        launches.append(make_launch(len(launches), arm.name, speed_of(arm.name, len(launches))))
    return [launch.arm for launch in launches]


def test_an_undecided_finalist_and_the_baseline_take_turns_to_the_last_launch():
    goal = Goal((NGRAM,), policy("jetson"), 0.0, max_launches=4)
    launched = order(goal, lambda name, index: 100 if name == "baseline" else (130, 131, 129, 130)[index % 4])
    assert launched == ["baseline", "ngram-k5", "ngram-k5", "baseline", "baseline", "ngram-k5", "ngram-k5", "baseline"]


def test_a_clear_case_ends_after_two_launches_each():
    goal = Goal((NGRAM,), policy("jetson"), 0.0, max_launches=9)
    launched = order(goal, lambda name, index: (100 if name == "baseline" else 300) + index)
    assert launched == ["baseline", "ngram-k5", "ngram-k5", "baseline"]


def test_what_failed_in_an_earlier_session_is_tried_again():
    goal = Goal((NGRAM,), policy("jetson"), 0.0, max_launches=3)
    launches = (make_launch(0, "baseline", 100), make_launch(1, "ngram-k5", 1, status="failed"))
    assert next_arm(goal, History(launches)) is None
    assert next_arm(goal, History(launches, since=2)) == NGRAM
    assert next_arm(goal, History(())) == BASELINE
