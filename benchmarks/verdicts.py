"""How often is a verdict wrong, and how many launches does it take? Simulated deployments whose truth is known.

    python benchmarks/verdicts.py [--deployments 2000] [--seed 1] [--workers 2]

Each deployment is one candidate beside its baseline, judged by the policy ``jetson`` (keep at +30 % throughput and
-20 % TPOT, disable below +10 % or for a loss at concurrency 8). Its true gain is -40 % ... +150 %, its launches vary by
1 to 6 % (CV), its prompts by up to 12 % each around their category's own gain, a tenth of the deployments drift within
a run (up to 8 %), and one request in fifty is an outlier (up to four times as long). The launches go through surespec's
own ``tune_steps`` and ``judge``; beside it stand a fixed design of six launches (3 + 3, one look at 95 % intervals) and
a naive comparison of one run each.

Truth is what an endless number of launches and prompts would show. ``false keep``: kept though the truth does not pass
the policy; ``false disable``: disabled though the truth is not to be disabled.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from surespec.core import BASELINE, Launch, Run, Trace
from surespec.judge import judge
from surespec.rules import policy as find_policy
from surespec.tune_plan import MAX_LAUNCHES, make_arm
from surespec.tune_steps import Goal, History, next_arm, verdict

POLICY = find_policy("jetson")
CATEGORIES = ("chat", "code", "copy", "summarise", "extraction", "structured", "tools", "reasoning", "multilingual")
PER_CATEGORY = 3
TPOT_MS, TTFT_MS, LENGTH = 20.0, 60.0, 64
K = 5
ARM = make_arm("ngram", K)


@dataclass(frozen=True)
class Truth:
    """One deployment. ``gain`` is of throughput at concurrency 1 (0.3 = 30 %), ``load`` the ratio at 8."""

    seed: int
    gain: float
    load: float
    cv: float
    prompt_sd: float
    category_sd: float
    drift: float

    tpot: float  # true ratio of the medians at concurrency 1

    @property
    def keep(self) -> bool:
        """Whether the policy keeps it."""
        fast = self.gain >= (POLICY.keep_throughput_gain or 0)
        return fast and self.tpot <= 1 - (POLICY.keep_tpot_reduction or 0) and self.load >= POLICY.load_keep_floor

    @property
    def disable(self) -> bool:
        """Whether the policy disables it."""
        return self.gain < POLICY.disable_gain or self.load < 1

    @property
    def distance(self) -> float:
        """Points (0.05 = 5) from the nearest threshold; that of TPOT is counted as the speed it stands for."""
        of_tpot = 1 / self.tpot - 1 / (1 - (POLICY.keep_tpot_reduction or 0))
        of_gain = (self.gain - POLICY.disable_gain, self.gain - (POLICY.keep_throughput_gain or 0))
        return min(abs(d) for d in (*of_gain, of_tpot, self.load - 1, self.load - POLICY.load_keep_floor))


def deployment(seed: int) -> Truth:
    """A deployment drawn at random."""
    rng = np.random.default_rng([seed, 1])
    truth = Truth(
        seed=seed,
        gain=float(rng.uniform(-0.4, 1.5)),
        load=float(rng.uniform(0.8, 1.3)),
        cv=float(rng.uniform(0.01, 0.06)),
        prompt_sd=float(rng.uniform(0.0, 0.12)),
        category_sd=float(rng.uniform(0.0, 0.3)),
        drift=float(rng.uniform(0.02, 0.08)) if rng.random() < 0.1 else 0.0,
        tpot=1.0,
    )
    base, own = prompts_of(truth, 2000, np.random.default_rng([seed, 4]))
    cand = base * tpot_target(1, 1 + truth.gain) * own
    return replace(truth, tpot=float(np.median(cand) / np.median(base)))


def prompts_of(truth: Truth, each: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """TPOT of the baseline in ms for ``each`` prompts a category, and what the candidate makes of each (mean 1)."""
    categories = np.random.default_rng([truth.seed, 3]).normal(0, truth.category_sd, len(CATEGORIES))
    count = each * len(CATEGORIES)
    base = TPOT_MS * np.exp(rng.normal(0, 0.05, count))
    own = np.exp(np.repeat(categories, each) + rng.normal(0, truth.prompt_sd, count))
    return base, own / (np.exp(categories).mean() * math.exp(truth.prompt_sd**2 / 2))


def tpot_target(width: int, ratio: float) -> float:
    """The TPOT ratio that gives this throughput ratio; the first token takes as long in both arms."""
    first = TTFT_MS * (1 if width == 1 else 2)
    e2e = first + (LENGTH - 1) * TPOT_MS
    return (e2e / ratio - first) / (e2e - first)


def launch(truth: Truth, index: int, name: str) -> Launch:
    """One server life of an arm."""
    rng = np.random.default_rng([truth.seed, 2, index])
    runs = tuple(_run(truth, name, width, rng) for width in (1, 8))
    return Launch(index=index, arm=name, status="ok", started_at="2026-01-01T00:00:00+00:00", runs=runs)


def _run(truth: Truth, name: str, width: int, rng: np.random.Generator) -> Run:
    # The prompts are those of the deployment: the same in every launch.
    base, own = prompts_of(truth, PER_CATEGORY, np.random.default_rng([truth.seed, 5]))
    count = len(base)
    tpot = base * np.exp(rng.normal(0, truth.cv)) * np.exp(rng.normal(0, 0.02, count))
    if name != BASELINE.name:
        tpot = tpot * tpot_target(width, 1 + truth.gain if width == 1 else truth.load) * own
    tpot = tpot * (1 + truth.drift * np.linspace(-0.5, 0.5, count))
    e2e = TTFT_MS * (1 if width == 1 else 2) + (LENGTH - 1) * tpot
    outlier = rng.random(count) < 0.02
    e2e = np.where(outlier, e2e * rng.uniform(1.5, 4.0, count), e2e)
    tpot = np.where(outlier, (e2e - TTFT_MS) / (LENGTH - 1), tpot)
    traces = tuple(
        Trace(
            prompt_id=f"{CATEGORIES[i // PER_CATEGORY]}-{i % PER_CATEGORY}", category=CATEGORIES[i // PER_CATEGORY],
            start_s=float(e2e[:i].sum() / 1e3 / width), ok=True, output_tokens=LENGTH, ttft_ms=TTFT_MS,
            tpot_ms=float(tpot[i]), e2e_latency_ms=float(e2e[i]),
        )
        for i in range(count)
    )  # fmt: skip
    duration = float(e2e.sum()) / 1e3 / width
    return Run(
        concurrency=width, num_requests=count, failed=0, duration_s=duration, output_tokens=count * LENGTH,
        throughput_tok_s=count * LENGTH / duration, ttft_ms_p50=TTFT_MS, ttft_ms_p99=TTFT_MS,
        tpot_ms_p50=float(np.median(tpot)), tpot_ms_p99=float(np.quantile(tpot, 0.99)), itl_ms_p50=None,
        itl_ms_p99=None, e2e_latency_ms_p50=float(np.median(e2e)), traces=traces,
    )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What the three designs said of one deployment; launches of both arms together."""

    truth: Truth
    ours: str
    launches: int
    fixed: str
    naive: str


def outcome(seed: int, *, most: int = MAX_LAUNCHES) -> Outcome:
    """Judge one deployment in the three ways."""
    truth = deployment(seed)
    goal = Goal((ARM,), POLICY, 0.0, most)
    history = History(())
    while (arm := next_arm(goal, history)) is not None:
        history = History((*history.launches, launch(truth, len(history.launches), arm.name)))
    said = verdict(goal, history, ARM).verdict
    fixed = [launch(truth, 100 + i, name) for i, name in enumerate((BASELINE.name, ARM.name) * 3)]
    arms = [[x for x in fixed if x.arm == name] for name in (BASELINE.name, ARM.name)]
    simple = judge(arms[0], arms[1], POLICY).verdict
    return Outcome(truth, said, len(history.launches), simple, _naive(arms[0][0], arms[1][0]))


def _naive(base: Launch, cand: Launch) -> str:
    """One run each, points instead of intervals: what most people do."""
    speed, load = (c.throughput_tok_s / b.throughput_tok_s for b, c in zip(base.runs, cand.runs, strict=True))
    tpot = (cand.runs[0].tpot_ms_p50 or 1) / (base.runs[0].tpot_ms_p50 or 1)
    if speed < 1 + POLICY.disable_gain or load < 1:
        return "disable"
    keep = speed >= 1 + (POLICY.keep_throughput_gain or 0) and tpot <= 1 - (POLICY.keep_tpot_reduction or 0)
    return "keep" if keep and load >= POLICY.load_keep_floor else "marginal"


def rates(outcomes: list[Outcome], pick: str) -> dict[str, float]:
    """False verdicts among ``outcomes`` as shares of all of them, and the share decided."""
    said = [(o.truth, getattr(o, pick)) for o in outcomes]
    count = max(1, len(said))
    return {
        "false keep": sum(v == "keep" and not t.keep for t, v in said) / count,
        "false disable": sum(v == "disable" and not t.disable for t, v in said) / count,
        "decided": sum(v != "inconclusive" for _, v in said) / count,
    }


def worst(found: dict[str, float]) -> float:
    """The larger of the two error rates."""
    return max(found["false keep"], found["false disable"])


def main() -> int:
    """Print the table; the exit code says whether the promises hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deployments", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    begun = time.monotonic()
    seeds = range(chosen.seed * 1_000_000, chosen.seed * 1_000_000 + chosen.deployments)
    with ProcessPoolExecutor(chosen.workers) as pool:
        outcomes = list(pool.map(partial(outcome), seeds, chunksize=20))
    print(
        f"{len(outcomes)} deployments in {time.monotonic() - begun:.0f} s; truth: "
        f"{sum(o.truth.keep for o in outcomes)} to keep, {sum(o.truth.disable for o in outcomes)} to disable"
    )
    bands = {
        "within 5 points": [o for o in outcomes if o.truth.distance < 0.05],
        "5 points or more away": [o for o in outcomes if o.truth.distance >= 0.05],
        "15 points or more away": [o for o in outcomes if o.truth.distance >= 0.15],
    }
    print(
        f"\n{'distance from a threshold':<26}{'':<7}{'design':<24}{'false keep':>11}{'false disable':>15}{'decided':>9}"
    )
    for band, members in bands.items():
        for pick, label in (("ours", "surespec"), ("fixed", "fixed six launches"), ("naive", "naive, one run each")):
            found = rates(members, pick)
            print(
                f"{band:<26}{len(members):>5}  {label:<24}" + f"{found['false keep']:>11.2%}"
                f"{found['false disable']:>15.2%}{found['decided']:>9.1%}"
            )
    decided = [o.launches for o in outcomes if o.ours != "inconclusive"]
    print(
        f"\nlaunches to a verdict (both arms): median {statistics.median(decided):.0f}, 90th percentile "
        f"{np.quantile(decided, 0.9):.0f}; the fixed design takes 6, the naive one 2"
    )
    near, far, clear = (rates(members, "ours") for members in bands.values())
    promises = {
        "false keep and false disable at most 1 % from 5 points on": max(far["false keep"], far["false disable"])
        <= 0.01,
        "at most 5 % within 5 points": worst(near) <= 0.05,
        "at least 80 % decided from 15 points on, within six launches an arm": clear["decided"] >= 0.8,
    }
    print()
    for promise, held in promises.items():
        print(f"{'holds' if held else 'FAILS'}: {promise}")
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
