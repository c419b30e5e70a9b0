"""Every row of the verdict table, and what the judgement says with it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surespec.core import Arm, BenchResult, Interval, Launch, Ratios, Run, Trace, Workload
from surespec.errors import ConfigError, InputFileError
from surespec.judge import Evidence, decide, judge, judge_results
from surespec.lossless import LosslessReport
from surespec.rules import policy

JETSON = policy("jetson")
EAGLE = Arm(
    name="eagle3-k3",
    method="eagle3",
    num_speculative_tokens=3,
    speculative_config={"method": "eagle3", "num_speculative_tokens": 3},
)


def make_run(concurrency=1, speed=50.0, tpot=20.0, **changes):
    """A run whose traces all have the same TPOT, so that only launches vary."""
    traces = tuple(
        Trace(
            prompt_id=f"p{i}", category="chat", start_s=0, ok=True, output_tokens=50, ttft_ms=50, tpot_ms=tpot,
            e2e_latency_ms=1000 * 50 * concurrency / speed, text=f"answer {i}",
        )
        for i in range(8)
    )  # fmt: skip
    fields = {
        "concurrency": concurrency, "num_requests": 8, "failed": 0, "duration_s": 400 / speed, "output_tokens": 400,
        "throughput_tok_s": speed, "ttft_ms_p50": 50, "ttft_ms_p99": 60, "tpot_ms_p50": tpot, "tpot_ms_p99": tpot,
        "itl_ms_p50": 20, "itl_ms_p99": 20, "e2e_latency_ms_p50": 1000, "traces": traces,
    }  # fmt: skip
    return Run(**{**fields, **changes})


def make_launches(arm, speeds, load=(200.0, 200.0), first=0, single_gain=None):
    """One launch a speed; TPOT follows the speed unless ``single_gain`` says otherwise."""
    launches = []
    for i, speed in enumerate(speeds):
        tpot = 1000 / speed if single_gain is None else single_gain
        runs = [make_run(1, speed, tpot)]
        if load:
            runs.append(make_run(8, load[i % len(load)], 8000 / load[i % len(load)]))
        launches.append(Launch(index=first + i, arm=arm, status="ok", started_at="", runs=tuple(runs)))
    return launches


BASE = make_launches("baseline", (49.5, 50.5), (199.0, 201.0))


def verdict_of(speeds, load=(200.0, 202.0), **kwargs):
    return judge(BASE, make_launches("eagle3-k3", speeds, load, first=2), JETSON, arm=EAGLE, **kwargs)


def test_keep_needs_both_weak_ends_and_carries_what_to_apply():
    judged = verdict_of((84.0, 86.0), command="surespec serve --spec", baseline_command="surespec serve")
    assert judged.verdict == "keep"
    assert judged.exit_code == 0
    assert judged.command == "surespec serve --spec"
    assert judged.speculative_config == EAGLE.speculative_config
    assert judged.arm == "eagle3-k3"
    assert set(judged.ratios) == {"c1", "c8"}
    assert judged.ratios["c1"].throughput_tok_s.low >= 1.30
    assert "1.70 times" in judged.why
    assert judged.why.count(". ") == 1, "two sentences"
    assert len(judged.launches) == 4
    assert judged.assumptions == ()


def test_more_tokens_but_not_less_time_per_token_is_not_kept():
    cand = make_launches("eagle3-k3", (84.0, 86.0), (200.0, 202.0), first=2, single_gain=19.5)
    judged = judge(BASE, cand, JETSON, arm=EAGLE)
    assert judged.verdict == "marginal"
    assert "your choice" in judged.why


def test_disable_when_the_best_end_gains_too_little():
    judged = verdict_of((50.5, 51.0), command="with", baseline_command="without")
    assert judged.verdict == "disable"
    assert judged.exit_code == 10
    assert judged.command == "without"
    assert judged.speculative_config is None
    assert judged.arm == "eagle3-k3"
    assert "10%" in judged.why
    assert "leave speculation off" in judged.why


def test_disable_when_load_surely_regresses_however_fast_one_user_is():
    judged = verdict_of((99.0, 101.0), load=(150.0, 151.0))
    assert judged.verdict == "disable"
    assert "8 users at once" in judged.why
    assert "--concurrency 1" in judged.why


def test_marginal_between_the_thresholds():
    judged = verdict_of((59.5, 60.5), command="with")
    assert judged.verdict == "marginal"
    assert judged.exit_code == 11
    assert judged.command == "with"
    assert "1.20 times" in judged.why


@pytest.mark.parametrize("speeds", [(60.0, 72.0), (50.0, 60.0), (45.0, 90.0)])
def test_an_interval_across_a_threshold_is_inconclusive_and_says_which(speeds):
    judged = verdict_of(speeds)
    assert judged.verdict == "inconclusive"
    assert judged.exit_code == 11
    assert "lies across" in judged.why
    assert judged.speculative_config is None


def test_an_uncertain_load_blocks_keep():
    judged = verdict_of((84.0, 86.0), load=(185.0, 205.0))
    assert judged.verdict == "inconclusive"
    assert "concurrency 8" in judged.why


def test_single_user_is_said():
    base = make_launches("baseline", (49.5, 50.5), load=())
    judged = judge(base, make_launches("eagle3-k3", (84.0, 86.0), load=(), first=2), JETSON, arm=EAGLE)
    assert judged.verdict == "keep"
    assert "single user only" in judged.why
    assert "Concurrency 8 was not measured" in judged.assumptions[0]


def test_a_fault_in_the_output_outranks_speed():
    fault = LosslessReport(lossless=False, detail="9 of 16 greedy texts differ.")
    judged = verdict_of((84.0, 86.0), lossless=fault)
    assert judged.verdict == "not_lossless"
    assert judged.exit_code == 12
    assert judged.lossless is False
    assert judged.speculative_config is None
    assert "9 of 16" in judged.why


def test_unproven_sameness_is_a_warning_not_a_verdict():
    judged = verdict_of((84.0, 86.0), lossless=LosslessReport(lossless=None, detail="Not compared."))
    assert judged.verdict == "keep"
    assert judged.lossless is None
    assert any("not proven" in w for w in judged.warnings)


def test_an_arm_that_never_ran_is_failed_with_its_reason():
    dead = Launch(index=2, arm="eagle3-k3", status="failed", started_at="", failure="the port is taken")
    judged = judge(BASE, [dead], JETSON, arm=EAGLE, baseline_command="without")
    assert judged.verdict == "failed"
    assert judged.exit_code == 1
    assert "the port is taken" in judged.why
    assert judged.command == "without"
    judged = judge([dead.model_copy(update={"arm": "baseline"})], BASE, JETSON)
    assert judged.verdict == "failed"
    assert "baseline" in judged.why


def test_without_concurrency_one_nothing_is_decided():
    only_load = [launch.model_copy(update={"runs": launch.runs[1:]}) for launch in BASE]
    judged = judge(only_load, only_load, JETSON)
    assert judged.verdict == "inconclusive"
    assert "concurrency 1" in judged.why


def test_failed_requests_and_slow_first_tokens_are_warned_of():
    lossy = [launch.model_copy(update={"runs": tuple(r.model_copy(update={"failed": 2}) for r in launch.runs)})
             for launch in BASE]  # fmt: skip
    slow = [launch.model_copy(update={"runs": tuple(r.model_copy(update={"ttft_ms_p50": 800}) for r in launch.runs)})
            for launch in BASE]  # fmt: skip
    assert any("failed 8 of 32" in w for w in judge(BASE, lossy, JETSON).warnings)
    assert any("W6" in w for w in judge(slow, BASE, JETSON).warnings)


def test_a_machine_that_was_not_left_alone_is_warned_of():
    assert any("something else uses this machine" in w for w in verdict_of((60.0, 90.0)).warnings)
    assert not any("something else" in w for w in verdict_of((84.0, 86.0)).warnings)


def test_a_policy_that_asks_for_nothing_is_refused():
    empty = JETSON.model_copy(update={"keep_throughput_gain": None, "keep_tpot_reduction": None})
    with pytest.raises(ConfigError, match="neither"):
        judge(BASE, BASE, empty)


def test_policies_that_ask_for_one_thing():
    cand = make_launches("ngram-k3", (59.5, 60.5), (150.0, 151.0), first=2)
    assert judge(BASE, cand, policy("latency")).verdict == "keep", "load is not looked at"
    assert judge(BASE, cand, policy("any-gain")).verdict == "disable", "a loss under load"
    assert judge(BASE, make_launches("n", (59.5, 60.5), first=2), policy("any-gain")).verdict in (
        "keep",
        "inconclusive",
    )


def interval(low, high):
    return Interval(estimate=(low + high) / 2, low=low, high=high)


ends = st.tuples(st.floats(0.3, 3.0), st.floats(0.3, 3.0)).map(sorted).map(lambda pair: interval(*pair))


@given(ends, ends, st.none() | ends, st.sampled_from(["jetson", "any-gain", "latency", "throughput"]))
def test_no_verdict_contradicts_its_intervals(speed, tpot, load, name):
    rule = policy(name)
    loads = Ratios(throughput_tok_s=load, tpot_ms_p50=tpot) if load else None
    verdict = decide(Evidence(Ratios(throughput_tok_s=speed, tpot_ms_p50=tpot), loads), rule)
    if verdict == "keep":
        assert speed.low >= 1 + (rule.keep_throughput_gain or -1)
        assert tpot.high <= 1 - (rule.keep_tpot_reduction or -9)
        assert load is None or load.low >= rule.load_keep_floor
    if verdict in ("keep", "marginal"):
        assert speed.high >= 1 + rule.disable_gain
        assert load is None or load.high >= 1
    if verdict == "disable":
        assert speed.high < 1 + rule.disable_gain or load.high < 1


@given(st.floats(0.5, 2.5), st.floats(0.0, 0.3))
def test_a_faster_candidate_never_gets_a_worse_verdict(centre, half):
    rank = {"disable": 0, "inconclusive": 1, "marginal": 1, "keep": 2}

    def at(value):
        speed, tpot = interval(value - half, value + half), interval(0.5, 0.6)
        return rank[decide(Evidence(Ratios(throughput_tok_s=speed, tpot_ms_p50=tpot), None), JETSON)]

    values = [at(centre + 0.1 * step) for step in range(8)]
    assert all(a <= b for a, b in itertools.pairwise(values))


def make_result(speed, load=200.0, *, model="m", source="surespec", traces=True, **workload):
    runs = [make_run(1, speed, 1000 / speed), make_run(8, load, 8000 / load)]
    runs = runs if traces else [run.model_copy(update={"traces": ()}) for run in runs]
    shape = Workload(**{"prompts": "mixed", "num_prompts": 8, "output_len": 50, **workload})
    return BenchResult(endpoint="http://x", model=model, runs=tuple(runs), source=source, workload=shape)


def test_two_files_are_one_launch_each_and_say_so():
    judged = judge_results(make_result(50.0), make_result(90.0, 215.0), JETSON)
    assert judged.verdict == "keep"
    assert any("3%" in a for a in judged.assumptions)
    assert judged.lossless is True
    close = judge_results(make_result(50.0), make_result(66.0, 215.0), JETSON)
    assert close.verdict == "inconclusive", "1.32 is not 1.30 for sure"


def test_files_of_other_tools_get_wider_intervals():
    with_traces = judge_results(make_result(50.0), make_result(90.0), JETSON).ratios["c1"].throughput_tok_s
    judged = judge_results(
        make_result(50.0, traces=False, source="jetson"), make_result(90.0, traces=False, source="jetson"), JETSON
    )
    without = judged.ratios["c1"].throughput_tok_s
    assert without.low < with_traces.low
    assert any("paired by prompt" in a for a in judged.assumptions)
    assert judged.lossless is None


def test_files_that_did_not_measure_the_same_thing_are_warned_of():
    judged = judge_results(make_result(50.0), make_result(90.0, model="other", output_len=99), JETSON)
    assert any("different models: m" in w for w in judged.warnings)
    assert any("output_len 50 and 99" in w for w in judged.warnings)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"throughput_tok_s": 0.0}, "throughput_tok_s 0"),
        ({"output_tokens": 0}, "0 output tokens"),
        ({"tpot_ms_p50": 0.0}, "tpot_ms_p50"),
        ({"tpot_ms_p50": None}, "tpot_ms_p50"),
        ({"concurrency": 2}, "no run at concurrency 1"),
    ],
)
def test_files_that_hold_nothing_are_refused_by_name(change, word):
    good = make_result(50.0)
    bad = good.model_copy(update={"runs": (good.runs[0].model_copy(update=change), good.runs[1])})
    with pytest.raises(InputFileError, match=word) as caught:
        judge_results(good, bad, JETSON, names=("a.json", "b.json"))
    assert caught.value.message.startswith("b.json")
    assert caught.value.hint
