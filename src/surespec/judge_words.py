"""The two sentences that explain a verdict to a newcomer, with the numbers it rests on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from surespec.core import Interval, Launch, Policy, Ratios, VerdictName


def explain(
    verdict: VerdictName,
    name: str,
    single: Ratios,
    load: Ratios | None,
    policy: Policy,
    *,
    confidence: float = 0.95,
    needed: int | None = None,
) -> str:
    """Two sentences for keep, disable, marginal and inconclusive: what was measured, and what follows.

    ``confidence`` is that of the intervals; ``needed`` launches of each arm would make an inconclusive verdict safe
    (None: no sensible number would).
    """
    measured = (
        f"With {name}, a single user gets {times(single.throughput_tok_s, confidence)} the baseline's tokens per "
        f"second and {_per_token(single.tpot_ms_p50)}."
    )
    at_load = _load_clause(load, policy, confidence)
    if verdict == "keep":
        second = f"Even the weak end of both passes policy {policy.name} ({wants(policy)}){at_load}."
    elif verdict == "disable":
        second = _disable(single, load, policy, confidence)
    elif verdict == "marginal":
        second = (
            f"That is a real gain, above the {policy.disable_gain:.0%} below which policy {policy.name} disables, but "
            f"certainly short of what it keeps ({wants(policy)}){at_load}: whether to use it is "
            "your choice."
        )
    else:
        second = (
            f"Policy {policy.name} ({wants(policy)}) cannot be decided on this, because {_open(single, load, policy)}: "
            f"{_what_it_would_take(needed)}."
        )
    return f"{measured} {second}"


def _what_it_would_take(needed: int | None) -> str:
    """What to do about an inconclusive verdict."""
    if needed is None:
        return "it lies too near to tell by more launches; measure more prompts, or choose yourself"
    return f"if the ratio stays as it is, about {needed} launches of each arm would decide it"


def percent(confidence: float) -> str:
    """``95 %``, ``99.3 %``."""
    return f"{100 * confidence:.1f}".removesuffix(".0") + " %"


def times(interval: Interval, confidence: float = 0.95) -> str:
    """``1.42 times (95 % interval 1.36 to 1.48)``; a third digit where two would hide on which side of 1 an end is."""
    digits = 3 if any(value != 1 and f"{value:.2f}" == "1.00" for value in (interval.low, interval.high)) else 2
    low, high = f"{interval.low:.{digits}f}", f"{interval.high:.{digits}f}"
    return f"{interval.estimate:.{digits}f} times ({percent(confidence)} interval {low} to {high})"


def wants(policy: Policy) -> str:
    """What a policy asks for before it keeps a setting."""
    parts = []
    if policy.keep_throughput_gain is not None:
        gain = policy.keep_throughput_gain
        parts.append(f"at least {gain:.0%} more tokens per second" if gain > 0 else "no fewer tokens per second")
    if policy.keep_tpot_reduction is not None:
        parts.append(f"at least {policy.keep_tpot_reduction:.0%} less time per token")
    return " and ".join(parts)


def failed(name: str, baseline: Sequence[Launch], candidate: Sequence[Launch], *, baseline_failed: bool) -> str:
    """Which arm gave no measurement, and the reason its last launch recorded."""
    launches = baseline if baseline_failed else candidate
    reasons = [launch.failure for launch in launches if launch.failure]
    reason = f": {reasons[-1].rstrip('.')}" if reasons else ""
    if baseline_failed:
        return (
            f"The baseline, the deployment without speculation, could not be measured{reason}. "
            "Without it nothing can be compared; make it work first."
        )
    return f"{name} could not be measured{reason}. The deployment without speculation is unchanged; go on using it."


def not_lossless(name: str, detail: str) -> str:
    """Why a fast arm is refused all the same."""
    return (
        f"With {name}, the model gives other answers: {detail.rstrip('.')}. Speculation must only change the speed, so "
        "do not use this setting, and report it to the engine's authors."
    )


def no_single_user(name: str, measured: Sequence[str]) -> str:
    """Concurrency 1 is missing in one of the arms."""
    found = ", ".join(measured) or "nothing"
    return (
        f"{name} was not measured at concurrency 1 beside the baseline (compared: {found}). "
        "Every policy decides there; measure again with --concurrency 1,8."
    )


def _per_token(tpot: Interval) -> str:
    """How the time per token changed, in per cent."""
    change = 1 - tpot.estimate
    ends = f"{tpot.low:.2f} to {tpot.high:.2f} of it"
    if abs(change) < 0.005:
        return f"waits as long for each token ({ends})"
    return f"waits {abs(change):.0%} {'less' if change > 0 else 'longer'} for each token ({ends})"


def _load_clause(load: Ratios | None, policy: Policy, confidence: float) -> str:
    """What is known about the load concurrency, as the tail of a sentence."""
    if policy.load_concurrency is None:
        return ""
    if load is None:
        return f"; concurrency {policy.load_concurrency} was not measured, so this holds for a single user only"
    ratio = times(load.throughput_tok_s, confidence)
    return f", and {policy.load_concurrency} users at once get {ratio} the baseline's throughput"


def _disable(single: Ratios, load: Ratios | None, policy: Policy, confidence: float) -> str:
    """The reason with the most weight: no gain for one user, else a loss under load."""
    least = f"{policy.disable_gain:.0%}"
    if single.throughput_tok_s.high < 1 + policy.disable_gain:
        short = f"the {least} gain below which policy {policy.name} disables" if policy.disable_gain else "any gain"
        return f"Even the best end of that falls short of {short}, so leave speculation off."
    ratio = load.throughput_tok_s if load else single.throughput_tok_s
    return (
        f"But {policy.load_concurrency} users at once get only {times(ratio, confidence)} the baseline's throughput, "
        "a certain loss, so leave speculation off (if the server only ever has one user, tune with --concurrency 1)."
    )


def _open(single: Ratios, load: Ratios | None, policy: Policy) -> str:
    """Which interval lies across which threshold."""
    speed, tpot = single.throughput_tok_s, single.tpot_ms_p50
    gains = sorted({policy.disable_gain, policy.keep_throughput_gain or policy.disable_gain})
    crossed = [f"{1 + gain:.2f}" for gain in gains if speed.low < 1 + gain <= speed.high]
    parts = [f"its throughput interval lies across {' and '.join(crossed)}"] if crossed else []
    reduction = policy.keep_tpot_reduction
    if reduction is not None and tpot.low <= 1 - reduction < tpot.high:
        parts.append(f"its interval of time per token lies across {1 - reduction:.2f}")
    if load is not None and load.throughput_tok_s.low < policy.load_keep_floor:
        ratio = load.throughput_tok_s
        parts.append(
            f"at concurrency {policy.load_concurrency} the ratio {ratio.estimate:.2f} ({ratio.low:.2f} to "
            f"{ratio.high:.2f}) neither excludes a loss nor proves one"
        )
    return " and ".join(parts) or "its intervals lie across the thresholds"
