"""The whole loop against a simulated deployment whose truth is known; no server is started."""

import json
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from surespec.core import Acceptance, Launch, Run, Trace
from surespec.errors import BundleError, ConfigError, Interrupted, UsageError
from surespec.store import Bundle
from surespec.tune import TuneProgress, tune
from surespec.tune_plan import TuneOptions, plan_tune
from surespec.tune_steps import why_failed

STEP_MS, TTFT_MS, LENGTH, PROMPTS = 20.0, 100.0, 65, 18
CATEGORIES = ("chat", "code", "copy")


@dataclass
class Deployment:
    """Truth of a simulated server. ``positions``: p_i of each method; ``per_k``: cost of a drafted token as a share of
    a step, at concurrency 1 and 8. ``noise``: launch-to-launch CV."""

    positions: dict = field(default_factory=lambda: {"ngram": (0.1, 0.05, 0.02, 0.0, 0.0)})
    per_k: dict = field(default_factory=lambda: {1: 0.05, 8: 0.05})
    noise: float = 0.005
    faulty: str = ""
    broken: tuple = ()
    interrupt_at: int = -1
    table_works: bool = True
    tax: float = 0.0  # log step cost of drafting nothing at 8, beside the baseline
    launched: list = field(default_factory=list)
    now: float = 0.0

    def clock(self):
        return self.now

    def __call__(self, arm, index, folder, on_trace):
        """The launch of an arm; every launch takes 50 simulated seconds."""
        self.launched.append(arm.name)
        self.now += 50
        base = {"index": index, "arm": arm.name, "started_at": "2026-01-01T00:00:00+00:00"}
        if any(arm.name.startswith(name) for name in self.broken):
            return Launch(**base, status="failed", failure="error: the head is for another model.")
        rng = random.Random(index)
        runs = []
        for width in (1, 8):
            run = self.run(arm, width, rng.gauss(0, self.noise))
            for number, trace in enumerate(run.traces):
                if len(self.launched) - 1 == self.interrupt_at and number == 5:
                    self.interrupt_at = -1
                    raise KeyboardInterrupt
                on_trace(width, trace)
            runs.append(run)
        return Launch(**base, status="ok", runs=tuple(runs), start_duration_s=5.0)

    def run(self, arm, width, noise):
        table = "alone" in arm.name and self.table_works
        k = 0 if table and width > 1 else arm.num_speculative_tokens
        positions = (self.positions.get(arm.method, ()) + (0.0,) * 8)[:k]
        tokens = 1 + sum(positions)
        step = (
            STEP_MS
            * (1 + self.per_k[width] * k)
            * (1.5 if width == 8 else 1.0)
            * np.exp(noise + (self.tax if table and width > 1 else 0.0))
        )
        drafts = round(PROMPTS * (LENGTH - 1) / tokens)
        reached = tuple(round(drafts * p) for p in positions)
        acceptance = Acceptance(drafts=drafts, drafted=drafts * k, accepted=sum(reached), accepted_per_position=reached)
        tpot = float(step / tokens)
        e2e = TTFT_MS + (LENGTH - 1) * tpot
        traces = tuple(
            Trace(
                prompt_id=f"p{i:02d}", category=CATEGORIES[i % 3], start_s=0, ok=True, output_tokens=LENGTH,
                ttft_ms=TTFT_MS, tpot_ms=tpot, e2e_latency_ms=e2e,
                text=f"answer {i}" + (" wrong" if arm.method == self.faulty and i % 2 else ""),
            )
            for i in range(PROMPTS)
        )  # fmt: skip
        return Run(
            concurrency=width, num_requests=PROMPTS, failed=0, duration_s=e2e * PROMPTS / 1e3 / width,
            output_tokens=PROMPTS * LENGTH, throughput_tok_s=LENGTH * width / e2e * 1e3, ttft_ms_p50=TTFT_MS,
            ttft_ms_p99=TTFT_MS, tpot_ms_p50=tpot, tpot_ms_p99=tpot, itl_ms_p50=20, itl_ms_p99=20,
            e2e_latency_ms_p50=e2e, acceptance=acceptance if k else None, traces=traces,
        )  # fmt: skip


GOOD = {"eagle3": (0.7, 0.5, 0.35, 0.25, 0.2), "ngram": (0.1, 0.05, 0.02, 0.0, 0.0)}


class Recorder(TuneProgress):
    """Keeps what it was told."""

    def __init__(self):
        self.said = []

    def planned(self, plan):
        self.said.append(("planned", plan.summary()))

    def launch_begins(self, arm, number, expected, remaining_s):
        self.said.append(("begins", arm.name, number, expected))
        assert remaining_s >= 0

    def launch_ends(self, launch):
        self.said.append(("ends", launch.arm, launch.status))

    def note(self, text):
        self.said.append(("note", text))


@pytest.fixture
def run(tmp_path):
    """Tune a deployment in a fresh folder."""

    def go(deployment, progress=None, **options):
        head = {"eagle3_head": "head"} if "eagle3" in deployment.positions or "eagle3" in deployment.broken else {}
        chosen = TuneOptions(**{"model": "smollm2-135m", "out": tmp_path / "run", **head, **options})
        if not head:
            chosen = TuneOptions(**{"out": tmp_path / "run", "methods": ("ngram",), **options})
        return tune(chosen, progress, measure=deployment, clock=deployment.clock)

    return go


def test_a_winner_is_kept_at_its_best_k(run, tmp_path):
    deployment = Deployment(positions=GOOD, per_k={1: 0.04, 8: 0.05})
    progress = Recorder()
    judged = run(deployment, progress)
    assert judged.verdict == "keep"
    assert judged.arm.startswith("eagle3-k")
    k = judged.speculative_config["num_speculative_tokens"]
    assert judged.speculative_config == {"method": "eagle3", "model": "head", "num_speculative_tokens": k}
    assert f'"num_speculative_tokens":{k}' in judged.command
    assert judged.command.startswith("surespec serve --model smollm2-135m")
    assert judged.lossless is True
    assert set(judged.ratios) == {"c1", "c8"}
    assert "best of" in judged.why
    assert judged.stopped == "Stopped after 2 launches of each arm: the verdict was safe."
    assert "to break even" in Bundle.open(tmp_path / "run").arm_notes()[judged.arm]
    assert judged.assumptions == ()
    bundle = Bundle.open(tmp_path / "run")
    assert bundle.judgement().verdict == "keep"
    assert [launch.arm for launch in bundle.launches()] == deployment.launched
    assert len(judged.launches) == len(deployment.launched)
    assert progress.said[0][0] == "planned"
    assert "minutes" in progress.said[0][1]
    assert all(arm.is_baseline or arm.name in bundle.arm_notes() for arm in bundle.arms())


def test_the_launches_alternate_and_the_best_k_is_found_without_a_grid(run):
    deployment = Deployment(positions=GOOD, per_k={1: 0.2, 8: 0.01})
    judged = run(deployment)
    launched = deployment.launched
    assert launched[:3] == ["baseline", "eagle3-k5", "ngram-k5"]
    speeds = {k: (1 + sum(GOOD["eagle3"][:k])) / (1 + 0.2 * k) for k in range(1, 6)}
    assert judged.arm == f"eagle3-k{max(speeds, key=speeds.get)}"
    best = judged.arm
    assert launched[3:] == [best, best, "baseline"], "A .. B B A"


def test_a_losing_set_is_disabled_and_names_its_best(run):
    judged = run(Deployment(positions={"eagle3": (0.05, 0, 0, 0, 0), "ngram": (0.1, 0.05, 0, 0, 0)}))
    assert judged.verdict == "disable"
    assert judged.speculative_config is None
    assert judged.arm in judged.why
    assert "speculative" not in judged.command


def test_a_gain_in_between_is_marginal(run):
    judged = run(Deployment(positions={"ngram": (0.2, 0.06, 0.0, 0.0, 0.0)}, per_k={1: 0.02, 8: 0.01}))
    assert judged.verdict == "marginal"
    assert 1.1 < judged.ratios["c1"].throughput_tok_s.estimate < 1.3


def test_a_loss_under_load_is_avoided_by_drafting_only_while_alone(run):
    deployment = Deployment(positions=GOOD, per_k={1: 0.04, 8: 0.9}, tax=-0.01)
    judged = run(deployment)
    assert judged.verdict == "keep"
    assert judged.arm == "eagle3-k5-alone"
    assert judged.speculative_config["num_speculative_tokens_per_batch_size"] == [[1, 1, 5], [2, 1024, 0]]
    assert "per_batch_size" in judged.command
    assert judged.ratios["c8"].throughput_tok_s.low > 0.97
    assert deployment.launched[3:] == ["eagle3-k5-alone", "eagle3-k5-alone", "baseline"]


def test_a_loss_under_load_disables_what_one_user_would_like(run):
    deployment = Deployment(positions=GOOD, per_k={1: 0.04, 8: 0.9}, table_works=False)
    judged = run(deployment)
    assert judged.verdict == "disable"
    assert judged.ratios["c1"].throughput_tok_s.low > 1.3
    assert "8 users at once" in judged.why


def test_noise_across_a_threshold_is_inconclusive_after_the_most_launches(run):
    deployment = Deployment(positions=GOOD, per_k={1: 0.27, 8: 0.01}, noise=0.1)
    judged = run(deployment)
    assert judged.verdict == "inconclusive"
    assert judged.exit_code == 11
    assert deployment.launched.count("baseline") == 6
    assert deployment.launched.count(judged.arm) == 6


def test_a_fault_in_the_output_is_never_kept(run):
    judged = run(Deployment(positions=GOOD, per_k={1: 0.04, 8: 0.05}, faulty="eagle3"))
    assert judged.verdict == "not_lossless"
    assert judged.exit_code == 12
    assert judged.speculative_config is None


def test_a_failed_arm_is_named_and_the_others_go_on(run):
    deployment = Deployment(positions={"ngram": (0.9, 0.8, 0.7, 0.6, 0.5)}, broken=("eagle3",))
    judged = run(deployment)
    assert judged.verdict == "keep"
    assert judged.arm.startswith("ngram")
    assert any("eagle3-k5" in warning and "another model" in warning for warning in judged.warnings)
    assert deployment.launched.count("eagle3-k5") == 1
    assert "failed" in [launch.status for launch in judged.launches]


def test_nothing_that_runs_is_failed_with_reasons(run):
    judged = run(Deployment(broken=("ngram",)))
    assert judged.verdict == "failed"
    assert judged.exit_code == 1
    assert "another model" in judged.why
    assert judged.command


def test_a_baseline_that_fails_ends_it_at_once(run):
    deployment = Deployment(broken=("baseline",))
    judged = run(deployment)
    assert judged.verdict == "failed"
    assert "baseline" in judged.why
    assert deployment.launched == ["baseline"]


def test_a_launch_that_told_no_time_per_token_says_so():
    nothing = Launch(index=0, arm="baseline", status="ok", started_at="2026-01-01T00:00:00+00:00")
    assert "--output-len" in why_failed(nothing)
    assert why_failed(nothing.model_copy(update={"failure": "It broke."})) == "It broke."


def test_an_arm_that_only_sometimes_starts_does_not_go_on_for_ever(run):
    class Flaky(Deployment):
        def __call__(self, arm, index, folder, on_trace):
            self.broken = ("ngram",) if self.launched.count("ngram-k5") else ()
            return super().__call__(arm, index, folder, on_trace)

    deployment = Flaky(positions={"ngram": (0.9, 0.8, 0.7, 0.6, 0.5)})
    judged = run(deployment)
    assert len(deployment.launched) < 10
    assert judged.verdict in ("keep", "inconclusive")


def test_ctrl_c_keeps_what_was_measured_and_resume_ends_alike(run, tmp_path):
    whole = run(Deployment(positions=GOOD, per_k={1: 0.04, 8: 0.05}), out=tmp_path / "whole")
    deployment = Deployment(positions=GOOD, per_k={1: 0.04, 8: 0.05}, interrupt_at=2)
    with pytest.raises(Interrupted) as caught:
        run(deployment)
    assert f"surespec tune --resume --out {tmp_path / 'run'}" in caught.value.hint
    bundle = Bundle.open(tmp_path / "run")
    assert [launch.status for launch in bundle.launches()] == ["ok", "ok", "interrupted"]
    traces = (tmp_path / "run" / "launches" / "002-ngram-k5" / "traces-c1.jsonl").read_text().splitlines()
    assert len(traces) == 5
    before = len(deployment.launched)
    judged = run(deployment, resume=True)
    assert deployment.launched[before] == "ngram-k5", "the cut-off launch is measured again, the others are not"
    assert judged.verdict == whole.verdict == "keep"
    assert judged.arm == whole.arm
    assert run(deployment, resume=True).verdict == "keep"
    assert len(deployment.launched) == len(judged.launches)


def test_resume_without_the_record_of_a_launch_measures_it_again(run, tmp_path):
    deployment = Deployment(positions=GOOD, per_k={1: 0.04, 8: 0.05})
    first = run(deployment)
    (tmp_path / "run" / "launches" / "001-eagle3-k5" / "launch.json").write_text("{")
    progress = Recorder()
    again = run(deployment, progress, resume=True)
    assert again.verdict == first.verdict
    assert any(kind == "note" and "001-eagle3-k5" in text for kind, text, *_ in progress.said)
    assert any("001-eagle3-k5" in warning for warning in again.warnings)


def test_resume_tries_failed_arms_again(run):
    deployment = Deployment(positions={**GOOD}, per_k={1: 0.04, 8: 0.05}, broken=("eagle3", "ngram"))
    assert run(deployment).verdict == "failed"
    deployment.broken = ()
    assert run(deployment, resume=True).verdict == "keep"


def test_resume_keeps_the_workload_of_the_bundle(run, tmp_path):
    run(Deployment(positions=GOOD), num_prompts=11)
    with pytest.raises(ConfigError, match="other"):
        run(Deployment(positions=GOOD), resume=True, model="other.gguf")
    with pytest.raises(ConfigError, match=r"--num-prompts 99: the run in .* has 11"):
        run(Deployment(positions=GOOD), resume=True, num_prompts=99)
    run(Deployment(positions=GOOD), resume=True, num_prompts=11)
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["options"]["num_prompts"] == 11


def test_the_budget_ends_it_with_what_is_known(run):
    deployment = Deployment(positions=GOOD, per_k={1: 0.04, 8: 0.05})
    judged = run(deployment, budget_s=60)
    assert deployment.launched == ["baseline"]
    assert judged.verdict == "inconclusive"
    assert "--resume" in judged.why
    judged = run(deployment, budget_s=110, resume=True)
    assert deployment.launched == ["baseline", "eagle3-k5", "ngram-k5"]
    assert any("budget" in warning for warning in judged.warnings) or judged.verdict != "inconclusive"
    assert judged.assumptions, "one launch an arm: the launch noise is assumed, and that is said"


def test_a_second_tune_is_refused_while_one_runs(run, tmp_path):
    class Nested(Deployment):
        def __call__(self, *args):
            with pytest.raises(BundleError, match="Another surespec"):
                run(Deployment(), resume=True)
            return super().__call__(*args)

    assert run(Nested()).verdict == "disable"


def test_single_user_is_enough_when_asked_for(run):
    class OneUser(Deployment):
        def __call__(self, *args):
            launch = super().__call__(*args)
            return launch.model_copy(update={"runs": launch.runs[:1]})

    judged = run(OneUser(positions=GOOD, per_k={1: 0.04, 8: 0.9}), concurrency=(1,))
    assert judged.verdict == "keep"
    assert "single user only" in judged.why


def test_a_dry_run_plans_and_touches_nothing(tmp_path):
    options = TuneOptions(out=tmp_path / "run", eagle3_head="head", draft_model="small", budget_s=3600)
    plan = plan_tune(options)
    assert [arm.name for arm in plan.arms] == ["baseline", "eagle3-k5", "draft_model-k4", "ngram-k5"]
    assert plan.arms[2].speculative_config["num_speculative_tokens"] == 4, "rule C2"
    document = plan.document()
    assert document["schema"] == "surespec/tune_plan/1"
    assert document["expected_s"] > 60
    assert all(arm["command"].startswith("surespec serve") for arm in document["arms"])
    assert "surespec serve" in plan.text()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"concurrency": (8,)}, UsageError, "1 is missing"),
        ({"policy": "mine"}, ConfigError, "mine"),
        ({"engine": "warp"}, ConfigError, "warp"),
        ({"budget_s": 0}, UsageError, "--budget"),
        ({"methods": ("magic",)}, UsageError, "magic"),
        ({"methods": ("draft_model",)}, UsageError, "no drafter"),
        ({"max_launches": 1}, UsageError, "max_launches"),
    ],
)
def test_what_cannot_be_tuned_is_said_before_anything_is_launched(tmp_path, change, error, word):
    with pytest.raises(error, match=word) as caught:
        tune(TuneOptions(**{"out": tmp_path / "run", **change}), measure=Deployment())
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_no_such_model(tmp_path):
    from surespec.errors import ModelError

    with pytest.raises(ModelError, match=r"nothing\.gguf"):
        plan_tune(TuneOptions(model="nothing.gguf", out=tmp_path / "run"))
