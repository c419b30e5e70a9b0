"""From launches to a verdict, by a policy. Pure: values in, values out.

The rules (requirements P1-P3). T and P are the intervals of the throughput and TPOT ratios at concurrency 1, L that of
throughput at the policy's load concurrency, all candidate / baseline. The first row that holds gives the verdict:

    failed         an arm has no launch that succeeded with a usable run
    not_lossless   the candidate's output is at fault, however fast it is
    inconclusive   concurrency 1 was not measured
    disable        T.high < 1 + disable_gain        even the best case gains too little
                   or L.high < 1                    a loss under load is certain
    keep           T.low >= 1 + keep_throughput_gain, P.high <= 1 - keep_tpot_reduction (each where the policy asks)
                   and L.low >= load_keep_floor     (skipped, and said, when the load was not measured)
    marginal       T.low >= 1 + disable_gain and L.low >= load_keep_floor: certainly not to be disabled,
                   and (T.high < 1 + keep_throughput_gain or P.low > 1 - keep_tpot_reduction): certainly not to be kept
    inconclusive   everything else: an interval lies across a threshold, so more launches are needed

So a verdict other than inconclusive never rests on a point estimate, and where both could be said of a load that is
surely, but slightly, slower (0.97 <= L < 1), disable wins, as P3 has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surespec import judge_words as words
from surespec.core import Arm, BenchResult, Judgement, Launch, Policy, Ratios, Run, VerdictName
from surespec.errors import ConfigError, InputFileError
from surespec.lossless import LosslessReport, compare_texts
from surespec.settling import settled
from surespec.stats import ASSUMED_LAUNCH_CV, Comparison, compare_runs, look_confidence, usable

DECIDING_CONCURRENCY = 1
MOST_FORESEEN = 40
NOISY_LAUNCHES = 0.10
"""Launches of one arm that differ by more than this (standard deviation) mean that the machine was not left alone."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a policy looks at: the ratios at concurrency 1 (``single``) and at its load concurrency (``load``)."""

    single: Ratios
    load: Ratios | None


def judge(
    baseline: Sequence[Launch],
    candidate: Sequence[Launch],
    policy: Policy,
    *,
    arm: Arm | None = None,
    label: str = "",
    lossless: LosslessReport | None = None,
    command: str = "",
    baseline_command: str = "",
    confidence: float = 0.95,
    launch_cv: float = ASSUMED_LAUNCH_CV,
) -> Judgement:
    """The verdict on ``candidate`` against ``baseline`` by the table above.

    ``label`` names the candidate in ``why`` (default: the arm's name). ``command`` starts the candidate and
    ``baseline_command`` the baseline; the judgement carries the one to use: the candidate's for keep and marginal, else
    the baseline's. ``speculative_config`` is set only with those two, so that a program that applies it never applies a
    refused one. Raises ConfigError for a policy that asks for nothing.
    """
    _check_policy(policy)
    name = label or (arm.name if arm else "the candidate")
    compared, noise = _all_comparisons(baseline, candidate, confidence, launch_cv)
    ratios = {key: comparison.ratios for key, comparison in compared.items()}
    assumptions = tuple(dict.fromkeys(said for c in compared.values() for said in c.assumptions))
    single = ratios.get(f"c{DECIDING_CONCURRENCY}")
    load = ratios.get(f"c{policy.load_concurrency}") if policy.load_concurrency else None
    verdict: VerdictName
    if not _measured(baseline) or not _measured(candidate):
        verdict, why = "failed", words.failed(name, baseline, candidate, baseline_failed=not _measured(baseline))
    elif lossless is not None and lossless.lossless is False:
        verdict, why = "not_lossless", words.not_lossless(name, lossless.detail)
    elif single is None:
        verdict, why = "inconclusive", words.no_single_user(name, sorted(ratios))
    else:
        evidence = Evidence(single, load)
        verdict = decide(evidence, policy)
        needed = launches_needed(compared, policy) if verdict == "inconclusive" else None
        why = words.explain(verdict, name, evidence.single, evidence.load, policy, confidence=confidence, needed=needed)
    to_use = verdict in ("keep", "marginal")
    return Judgement(
        verdict=verdict,
        policy=policy.name,
        why=why,
        arm=arm.name if arm else None,
        speculative_config=arm.speculative_config if arm and to_use else None,
        command=command if to_use else baseline_command,
        ratios=ratios,
        confidence=confidence,
        lossless=lossless.lossless if lossless else None,
        lossless_detail=lossless.detail if lossless else "",
        launches=(*baseline, *candidate),
        warnings=(*_warnings(baseline, candidate, lossless, to_use), *noise),
        assumptions=_policy_assumptions(assumptions, policy, load),
    )


def decide(evidence: Evidence, policy: Policy) -> VerdictName:
    """The rows of the table from ``disable`` on."""
    speed, tpot = evidence.single.throughput_tok_s, evidence.single.tpot_ms_p50
    load = evidence.load.throughput_tok_s if evidence.load else None
    if speed.high < 1 + policy.disable_gain or (load is not None and load.high < 1):
        return "disable"
    gain, reduction = policy.keep_throughput_gain, policy.keep_tpot_reduction
    load_safe = load is None or load.low >= policy.load_keep_floor
    fast_enough = gain is None or speed.low >= 1 + gain
    short_enough = reduction is None or tpot.high <= 1 - reduction
    if load_safe and fast_enough and short_enough:
        return "keep"
    too_slow = gain is not None and speed.high < 1 + gain
    too_long = reduction is not None and tpot.low > 1 - reduction
    if load_safe and speed.low >= 1 + policy.disable_gain and (too_slow or too_long):
        return "marginal"
    return "inconclusive"


def launches_needed(compared: Mapping[str, Comparison], policy: Policy) -> int | None:
    """Launches of each arm after which the verdict would be safe, if every estimate and spread stayed as it is; None
    where not even ``MOST_FORESEEN`` would do (the ratio is too near to a threshold, or the prompts are too few)."""
    single = compared[f"c{DECIDING_CONCURRENCY}"]
    load = compared.get(f"c{policy.load_concurrency}")
    for launches in range(min(single.launches) + 1, MOST_FORESEEN + 1):
        confidence = look_confidence(launches, launches)
        evidence = Evidence(
            single.foreseen(launches, confidence), load.foreseen(launches, confidence) if load is not None else None
        )
        if decide(evidence, policy) != "inconclusive":
            return launches
    return None


def judge_results(
    baseline: BenchResult,
    candidate: BenchResult,
    policy: Policy,
    *,
    names: tuple[str, str] = ("the baseline file", "the candidate file"),
) -> Judgement:
    """The verdict from two result files, each one launch (an assumption that the judgement states).

    ``names`` are used in messages. Raises InputFileError when a file lacks concurrency 1 or holds zeros, which is what
    some benchmark scripts write when their client failed.
    """
    for result, name in zip((baseline, candidate), names, strict=True):
        _check_result(result, name)
    base = Launch(index=0, arm="baseline", status="ok", started_at=baseline.started_at, runs=baseline.runs)
    cand = Launch(index=1, arm="candidate", status="ok", started_at=candidate.started_at, runs=candidate.runs)
    workload = baseline.workload
    lossless = None
    if workload is not None and workload == candidate.workload and _has_texts(base) and _has_texts(cand):
        lossless = compare_texts([base], [cand], temperature=workload.temperature)
    judged = judge([base], [cand], policy, lossless=lossless)
    extra = (*_differences(baseline, candidate, names), *baseline.warnings, *candidate.warnings)
    return judged.model_copy(update={"warnings": (*judged.warnings, *dict.fromkeys(extra))})


def _check_policy(policy: Policy) -> None:
    """A policy must say when to keep, else everything would be kept."""
    if policy.keep_throughput_gain is None and policy.keep_tpot_reduction is None:
        raise ConfigError(
            f"policy {policy.name}: neither keep_throughput_gain nor keep_tpot_reduction is set.",
            hint="Set at least one, so that the policy says when a setting is kept.",
        )


def _check_result(result: BenchResult, name: str) -> None:
    """Refuse files that cannot be judged, naming run and field."""
    if not any(run.concurrency == DECIDING_CONCURRENCY for run in result.runs):
        found = ", ".join(str(run.concurrency) for run in result.runs) or "none"
        raise InputFileError(
            f"{name}: there is no run at concurrency 1 (found: {found}), and that is where a verdict is made.",
            hint="Measure again with --concurrency 1,8.",
        )
    for run in result.runs:
        where = f"{name}: the run at concurrency {run.concurrency}"
        if run.throughput_tok_s <= 0 or (result.source == "surespec" and run.output_tokens <= 0):
            raise InputFileError(
                f"{where} has throughput_tok_s {run.throughput_tok_s:g} and {run.output_tokens} output tokens, so "
                "nothing was measured.",
                hint="The benchmark's client probably failed; look at its log and measure again.",
            )
        if run.tpot_ms_p50 is None or run.tpot_ms_p50 <= 0:
            raise InputFileError(
                f"{where} has no tpot_ms_p50 above zero ({run.tpot_ms_p50}).",
                hint="Measure again with an output length of at least two tokens.",
            )


def _all_comparisons(
    baseline: Sequence[Launch], candidate: Sequence[Launch], confidence: float, launch_cv: float
) -> tuple[dict[str, Comparison], list[str]]:
    """The arms at every concurrency that both measured, keyed ``c1`` ..., and noise to warn of."""
    base, cand = _runs_by_concurrency(baseline), _runs_by_concurrency(candidate)
    compared: dict[str, Comparison] = {}
    noise: list[str] = []
    for width in sorted(base.keys() & cand.keys()):
        steady = settled(base[width], cand[width])
        noise += [steady.remark] if steady.remark else []
        comparison = compare_runs(steady.baseline, steady.candidate, confidence=confidence, launch_cv=launch_cv)
        compared[f"c{width}"] = comparison
        if comparison.launch_spread is not None and comparison.launch_spread > NOISY_LAUNCHES:
            noise.append(
                f"At concurrency {width} launches of the same arm differ by about {comparison.launch_spread:.0%}: "
                "something else uses this machine, or its clock changes; measure again when it is quiet."
            )
    return compared, noise


def _runs_by_concurrency(launches: Sequence[Launch]) -> dict[int, list[Run]]:
    """Usable runs of ok launches; a launch gives one run at a concurrency."""
    found: dict[int, list[Run]] = {}
    for launch in launches:
        if launch.status == "ok":
            for run in launch.runs:
                if usable(run):
                    found.setdefault(run.concurrency, []).append(run)
    return found


def _measured(launches: Sequence[Launch]) -> bool:
    """True when an arm has something to compare."""
    return bool(_runs_by_concurrency(launches))


def _has_texts(launch: Launch) -> bool:
    return any(trace.text for run in launch.runs for trace in run.traces)


def _warnings(
    baseline: Sequence[Launch], candidate: Sequence[Launch], lossless: LosslessReport | None, to_use: bool
) -> tuple[str, ...]:
    """What a reader should know besides the verdict."""
    said: list[str] = []
    for name, launches in (("The baseline", baseline), ("The candidate", candidate)):
        runs = [run for launch in launches if launch.status == "ok" for run in launch.runs]
        failed = sum(run.failed for run in runs)
        if failed:
            total = sum(run.num_requests for run in runs)
            said.append(f"{name} failed {failed} of {total} requests; they are not in any average.")
        lost = [launch for launch in launches if launch.status == "failed"]
        said.extend(f"{name}: launch {launch.index} failed ({launch.failure}) and is not counted." for launch in lost)
    if _mostly_first_token(baseline):
        said.append(
            "More than half of a request's time goes by before its first token, and speculation does not shorten that "
            "(rule W6)."
        )
    if lossless is not None and lossless.lossless is None and to_use:
        said.append(f"Sameness of output is not proven. {lossless.detail}")
    return tuple(said)


def _mostly_first_token(baseline: Sequence[Launch]) -> bool:
    """True when TTFT is more than half of E2E at concurrency 1 (some tools leave E2E out)."""
    runs = _runs_by_concurrency(baseline).get(DECIDING_CONCURRENCY, [])
    return any(
        run.e2e_latency_ms_p50 and run.ttft_ms_p50 and run.ttft_ms_p50 > 0.5 * run.e2e_latency_ms_p50 for run in runs
    )


def _policy_assumptions(assumptions: tuple[str, ...], policy: Policy, load: Ratios | None) -> tuple[str, ...]:
    """Adds that the load was not looked at, where the policy would."""
    if policy.load_concurrency is None or load is not None:
        return assumptions
    return (*assumptions, f"Concurrency {policy.load_concurrency} was not measured: the server has a single user.")


def _differences(baseline: BenchResult, candidate: BenchResult, names: tuple[str, str]) -> list[str]:
    """Where two files did not measure the same thing."""
    said: list[str] = []
    if baseline.model != candidate.model:
        said.append(f"The files name different models: {baseline.model} ({names[0]}), {candidate.model} ({names[1]}).")
    if baseline.source != candidate.source:
        said.append(f"The files come from different tools: {baseline.source} and {candidate.source}.")
    a, b = baseline.workload, candidate.workload
    if a is not None and b is not None and a != b:
        fields = [f for f in type(a).model_fields if getattr(a, f) != getattr(b, f)]
        parts = ", ".join(f"{f} {getattr(a, f)} and {getattr(b, f)}" for f in fields)
        said.append(f"The workloads differ ({parts}), so the ratio is not of speculation alone.")
    return said
