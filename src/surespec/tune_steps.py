"""Which arm to launch next, and what the launches so far say. Pure: everything follows from the launches.

So a run that was cut off and resumed takes the same decisions as one that was not. The order is: baseline; every
drafter once, at a large k; the k that this predicts to be faster than all that was measured; then the best arm and the
baseline in turn (A B B A) until the verdict is safe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surespec.core import BASELINE, Arm, Judgement, Launch, Policy, Run
from surespec.judge import judge
from surespec.lossless import LosslessReport, compare_texts
from surespec.predict import (
    TIE,
    Prediction,
    break_even_tokens,
    calibrated,
    candidate_ks,
    choose,
    predict,
    tokens_per_step,
)
from surespec.stats import look_confidence, usable
from surespec.tune_plan import MIN_LAUNCHES, named_arm, with_k

LOAD_SLACK = 0.03
"""A predicted load ratio may be this far below the floor: predictions are rough, measuring settles it."""

MAY_WIN = 0.03
ONE_LOOK = 0.95
SAFE = ("keep", "marginal", "disable", "not_lossless")


@dataclass(frozen=True, slots=True)
class Goal:
    """What a run is to find out: the probing arms, the policy, and how often an arm may be launched.

    ``k_by_batch_size``: the engine can draft a number of tokens that depends on how many requests run.
    """

    probes: tuple[Arm, ...]
    policy: Policy
    temperature: float
    max_launches: int
    k_by_batch_size: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """The launches so far. Failed ones before ``since`` are of an earlier session, so they may be tried again."""

    launches: tuple[Launch, ...]
    since: int = 0

    def ok(self, name: str) -> list[Launch]:
        """Launches of an arm that can be compared at concurrency 1."""
        return [launch for launch in self.launches if launch.arm == name and launch.status == "ok" and _run(launch, 1)]

    def failed(self, name: str) -> list[Launch]:
        """Launches of an arm that failed, or measured nothing, in this session."""
        good = {launch.index for launch in self.ok(name)}
        return [
            launch
            for launch in self.launches
            if launch.arm == name and launch.status != "interrupted" and launch.index not in good
            and launch.index >= self.since
        ]  # fmt: skip

    def failures_in_a_row(self, name: str) -> int:
        """Failed launches of an arm in this session since its last good one."""
        return sum(launch.index > self.last(name) for launch in self.failed(name))

    def last(self, name: str) -> int:
        """Index of the last ok launch of an arm, -1 without one."""
        return max((launch.index for launch in self.ok(name)), default=-1)


def next_arm(goal: Goal, history: History) -> Arm | None:
    """The arm to launch next; None when the verdict is as safe as it can be made."""
    if not history.ok(BASELINE.name):
        return None if history.failed(BASELINE.name) else BASELINE
    for probe in goal.probes:
        if not history.ok(probe.name) and not history.failed(probe.name):
            return probe
    better = predicted_arm(goal, history)
    if better is not None and not history.failed(better.name):
        return better
    best = finalist(goal, history)
    if best is None:
        return None
    done = {arm.name: len(history.ok(arm.name)) for arm in (BASELINE, best)}
    if min(done.values()) >= MIN_LAUNCHES and verdict(goal, history, best).verdict in SAFE:
        return None
    tired = [arm for arm in (BASELINE, best) if history.failures_in_a_row(arm.name) >= 2]
    if tired or min(done.values()) >= goal.max_launches:
        return None
    if done[BASELINE.name] != done[best.name]:
        return BASELINE if done[BASELINE.name] < done[best.name] else best
    return BASELINE if history.last(BASELINE.name) > history.last(best.name) else best


def predicted_arm(goal: Goal, history: History) -> Arm | None:
    """The arm, not yet measured, that may still win; None without one.

    From one k of a drafter alone, predictions of its others are rough (``predict.FIXED_SHARE``), so one that is at most
    ``MAY_WIN`` behind the best measured arm is worth a launch if its interval reaches beyond it; once two are measured,
    it has to be predicted ahead by more than a tie. Also None once an arm is being confirmed: predictions are for
    choosing whom to confirm.
    """
    if any(len(history.ok(arm.name)) >= MIN_LAUNCHES for arm in known_arms(goal, history)):
        return None
    known = [arm for arm in known_arms(goal, history) if history.ok(arm.name)]
    measured = {arm.name: score(goal, history, arm) for arm in known}
    forecasts = [found for probe in goal.probes for found in forecast(goal, history, probe)]
    unmeasured = [found for found in forecasts if not history.ok(found.arm.name)]
    if not unmeasured or not measured:
        return None
    hope = max(unmeasured, key=lambda found: (found.safe, found.ratio))
    best_safe, best_ratio = max(measured.values())
    rough = sum(other.method == hope.arm.method for other in known) < 2
    may_win = rough and hope.ratio > best_ratio * (1 - MAY_WIN) and hope.high > best_ratio * (1 + TIE)
    ahead = hope.ratio > best_ratio * (1 + TIE) or may_win
    return hope.arm if (hope.safe and not best_safe) or (hope.safe == best_safe and ahead) else None


@dataclass(frozen=True, slots=True)
class Forecast:
    """An arm with its predicted speed ratio, the upper end of its interval, and whether no rule would disable it."""

    arm: Arm
    ratio: float
    high: float
    safe: bool


def forecast(goal: Goal, history: History, probe: Arm) -> list[Forecast]:
    """The best k of one drafter.

    Where the load at the best k forbids it, drafting only while alone comes second: its load is the baseline's.
    """
    single = _predictions(goal, history, probe, 1)
    width = goal.policy.load_concurrency
    load = _predictions(goal, history, probe, width) if width else ()
    floor = goal.policy.load_keep_floor - LOAD_SLACK
    best, alone = choose(single, load, load_floor=floor), choose(single)
    if best is None or alone is None:
        return []
    least = 1 + goal.policy.disable_gain
    load_safe = not load or any(p.k == best.k and p.speed_ratio >= floor for p in load)
    found = [Forecast(with_k(probe, best.k), best.speed_ratio, best.high, load_safe and best.speed_ratio >= least)]
    if goal.k_by_batch_size and load and not (load_safe and best.speed_ratio * (1 + TIE) >= alone.speed_ratio):
        arm = with_k(probe, alone.k, alone=True)
        found.append(Forecast(arm, alone.speed_ratio, alone.high, alone.speed_ratio >= least))
    return found


def _predictions(goal: Goal, history: History, probe: Arm, width: int) -> tuple[Prediction, ...]:
    """Speed ratios of every k of a drafter at one concurrency, from the first launches of baseline and probe."""
    base = _run(history.ok(BASELINE.name)[0], width) if history.ok(BASELINE.name) else None
    mine = _run(history.ok(probe.name)[0], width) if history.ok(probe.name) else None
    if base is None or mine is None:
        return ()
    single = _run(history.ok(probe.name)[0], 1)
    k = probe.num_speculative_tokens
    raw = predict(base, mine, k, candidate_ks(k, single.acceptance if single else None))
    return calibrated(raw, k, _ratio(goal.policy, [base], [mine], width))


def known_arms(goal: Goal, history: History) -> list[Arm]:
    """The probes and every other k of theirs that was launched or is predicted, in that order, each once."""
    found = {probe.name: probe for probe in goal.probes}
    for launch in history.launches:
        arm = named_arm(goal.probes, launch.arm)
        if arm is not None:
            found.setdefault(arm.name, arm)
    for probe in goal.probes:
        for predicted in forecast(goal, history, probe):
            found.setdefault(predicted.arm.name, predicted.arm)
    return list(found.values())


def score(goal: Goal, history: History, arm: Arm) -> tuple[bool, float]:
    """How good a measured arm looks: first whether no rule would disable it on its estimates, then its speed ratio."""
    ratio = _speed_ratio(goal.policy, history, arm, 1)
    if ratio is None:
        return False, 0.0
    safe = ratio >= 1 + goal.policy.disable_gain
    if goal.policy.load_concurrency is not None:
        load = _speed_ratio(goal.policy, history, arm, goal.policy.load_concurrency)
        safe = safe and (load is None or load >= goal.policy.load_keep_floor - LOAD_SLACK)
    return safe, ratio


def finalist(goal: Goal, history: History) -> Arm | None:
    """The arm the verdict is about. Once confirmed by a second launch it stays; ties go to the smaller k."""
    arms = [arm for arm in known_arms(goal, history) if history.ok(arm.name)]
    if not arms:
        return None
    most = max(len(history.ok(arm.name)) for arm in arms)
    if most >= MIN_LAUNCHES:
        arms = [arm for arm in arms if len(history.ok(arm.name)) == most]
    scores = {arm.name: score(goal, history, arm) for arm in arms}
    safe, ratio = max(scores.values())
    tied = [a for a in arms if scores[a.name][0] == safe and scores[a.name][1] >= ratio / (1 + TIE)]
    return min(tied, key=lambda arm: arm.num_speculative_tokens)


def verdict(goal: Goal, history: History, arm: Arm, *, command: str = "", baseline_command: str = "") -> Judgement:
    """Judge one arm on all its launches and the baseline's, on intervals that allow for looking again and again."""
    base, cand = history.ok(BASELINE.name), history.ok(arm.name)
    looked = min(len(base), len(cand))
    confidence = look_confidence(looked, goal.max_launches) if looked >= MIN_LAUNCHES else ONE_LOOK
    tried = sum(1 for a in known_arms(goal, history) if history.ok(a.name))
    return judge(
        base,
        cand,
        goal.policy,
        arm=arm,
        label=f"{arm.name} (the best of {tried} settings tried)" if tried > 1 else arm.name,
        lossless=lossless(goal, base, cand),
        command=command,
        baseline_command=baseline_command,
        confidence=confidence,
    )


def lossless(goal: Goal, baseline: Sequence[Launch], candidate: Sequence[Launch]) -> LosslessReport:
    """Sameness of output of one arm."""
    return compare_texts(baseline, candidate, temperature=goal.temperature)


def doubtful(goal: Goal, history: History) -> dict[str, tuple[int, str]]:
    """Prompts in which an arm's text left the baseline's, with the place and the baseline's text, that have not been
    asked for the gap there yet."""
    base = history.ok(BASELINE.name)
    asked = {(gap.prompt_id, gap.position) for launch in base for gap in launch.gaps}
    texts = {t.prompt_id: t.text for launch in base[:1] for run in launch.runs for t in run.traces if t.ok}
    found: dict[str, tuple[int, str]] = {}
    for arm in known_arms(goal, history):
        for divergence in lossless(goal, base, history.ok(arm.name)).divergences if base else ():
            place = (divergence.prompt_id, divergence.position)
            if place not in asked and divergence.prompt_id in texts:
                found.setdefault(divergence.prompt_id, (divergence.position, texts[divergence.prompt_id]))
    return found


def arm_notes(goal: Goal, history: History) -> dict[str, str]:
    """What is known about each arm: its measured or predicted speed, or why it failed."""
    notes = {}
    predicted = {f.arm.name: f.ratio for probe in goal.probes for f in forecast(goal, history, probe)}
    for arm in known_arms(goal, history):
        failures = history.failed(arm.name)
        said = []
        if arm.name in predicted:
            said.append(f"predicted {predicted[arm.name]:.2f} times the baseline's speed")
        if history.ok(arm.name):
            said.append(f"measured {score(goal, history, arm)[1]:.2f} times")
            said += _break_even(history, arm)
        elif failures:
            said.append(f"failed: {why_failed(failures[-1])}")
        else:
            said.append("not measured")
        notes[arm.name] = ", ".join(said)
    return notes


def _break_even(history: History, arm: Arm) -> list[str]:
    """What a drafter would have to reach at this k to be as fast as the baseline, beside what it reaches."""
    base, mine = _run(history.ok(BASELINE.name)[0], 1), _run(history.ok(arm.name)[0], 1)
    if base is None or mine is None or mine.acceptance is None or not mine.acceptance.drafts:
        return []
    needed, reached = break_even_tokens(base, mine), tokens_per_step(mine)
    if needed is None or reached is None:
        return []
    return [f"a step gives {reached:.2f} tokens and has to give {needed:.2f} to break even"]


def _speed_ratio(policy: Policy, history: History, arm: Arm, width: int) -> float | None:
    """Point estimate of how fast an arm is beside the baseline; None when one was not measured at ``width``."""
    base = [run for launch in history.ok(BASELINE.name) if (run := _run(launch, width))]
    cand = [run for launch in history.ok(arm.name) if (run := _run(launch, width))]
    return _ratio(policy, base, cand, width) if base and cand else None


def _ratio(policy: Policy, base: Sequence[Run], cand: Sequence[Run], width: int) -> float:
    """What the policy looks at: the throughput ratio, or the inverse TPOT ratio where it asks for that alone."""
    if policy.keep_throughput_gain is None and width == 1:
        return math.exp(
            _mean_log([r.tpot_ms_p50 or 1.0 for r in base]) - _mean_log([r.tpot_ms_p50 or 1.0 for r in cand])
        )
    return math.exp(_mean_log([r.throughput_tok_s for r in cand]) - _mean_log([r.throughput_tok_s for r in base]))


def _mean_log(values: Sequence[float]) -> float:
    return math.fsum(math.log(value) for value in values) / len(values)


def why_failed(launch: Launch) -> str:
    """Why a launch cannot be compared, one sentence."""
    return launch.failure or "Its answers came in one piece each, without a time per token; try a longer --output-len."


def _run(launch: Launch, width: int) -> Run | None:
    """The usable run of a launch at a concurrency."""
    return next((run for run in launch.runs if run.concurrency == width and usable(run)), None)
