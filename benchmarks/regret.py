"""How much speed is lost by surespec's choice of k, beside the best of a grid that launches everything?

    python benchmarks/regret.py --data specbundle.json [--curves curves.json] [--measure curves.json]

Two sources of truth:

* ``--data``: SpecBundle, public measurements of EAGLE-3 heads on SGLang (440 cells: model x task x head x setting; not
  part of this project). The choice starts from the baseline and one launch of each head at its largest chain (k = 7);
  the acceptance of smaller k is what a run at k = 7 tells of them. Trees (topk > 1) are arms that surespec does not
  launch; the regret against them is printed too.
* ``--curves``: curves of the embedded engine, tokens per second for k = 0 ... 8, concurrency 1, 4 and 8, chat and copy,
  made by ``--measure`` on this machine (about an hour). The choice sees some rounds, put together as one launch (24
  prompts, about what ``tune`` measures); the truth is what the other rounds say, smoothed over k.

The choice itself is surespec's: ``predict`` (step costs, p_i), the rule of ``tune_steps`` for what may still win, ties
to the smaller k. A grid launches every setting as often as surespec launches the one it confirms (twice).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from surespec.core import Acceptance, Run
from surespec.predict import TIE, Prediction, calibrated, candidate_ks, predict
from surespec.tune_plan import MIN_LAUNCHES, PROBE_K
from surespec.tune_steps import MAY_WIN

WITHIN = 0.03
LARGEST_K = 8


@dataclass(frozen=True)
class Choice:
    """One cell: what the chosen setting loses beside the best, launches used and those of a grid.

    ``regret_grid``: what the best of a grid that saw the same noisy launches loses; None where truth is what it saw.
    """

    cell: str
    regret: float
    regret_all: float
    launches: int
    grid: int
    regret_grid: float | None = None


def choose(
    speeds: Mapping[tuple[str, int], float], probes: Mapping[str, tuple[int, tuple[Prediction, ...]]]
) -> tuple[tuple[str, int], int]:
    """The arm chosen by surespec's rules, and the launches it took. ``speeds`` are read only for what is launched.

    ("", 0) is the baseline; ``probes`` gives for each drafter the k of its probe and the predictions from it.
    """
    launched = {("", 0)} | {(name, k) for name, (k, _) in probes.items()}
    while True:
        best = max(speeds[arm] for arm in launched)
        open_ = {
            (name, p.k): p
            for name, (_, found) in probes.items()
            for p in found
            if (name, p.k) not in launched and (name, p.k) in speeds
        }
        if not open_:
            break
        base = speeds["", 0]
        top = max(p.speed_ratio for p in open_.values())
        arm = min((a for a, p in open_.items() if p.speed_ratio >= top / (1 + TIE)), key=lambda a: a[1])
        rough = sum(name == arm[0] for name, _ in launched) < 2
        hope = open_[arm]
        may = rough and hope.speed_ratio * base > best * (1 - MAY_WIN) and hope.high * base > best * (1 + TIE)
        if not (hope.speed_ratio * base > best * (1 + TIE) or may):
            break
        launched.add(arm)
    best = max(speeds[arm] for arm in launched)
    chosen = min((a for a in launched if speeds[a] >= best / (1 + TIE)), key=lambda a: a[1])
    confirming = 2 * (MIN_LAUNCHES - 1)  # the baseline and the chosen arm once more
    return chosen, len(launched) + confirming


def of_specbundle(path: Path) -> list[Choice]:
    """One choice a model and task."""
    out = []
    for model, tasks in json.loads(path.read_text(encoding="utf-8")).items():
        for task, entry in tasks.items():
            base, cells = 0.0, {}
            for row in entry["results"]:
                for metric in row["metrics"]:
                    head = metric["Name"].replace(" ", "")
                    if metric["accept_length"] <= 1.0 and "EAGLE3" in head and head.startswith(("Wihtout", "Without")):
                        base = metric["output_throughput"]
                    else:
                        cells[head, row["steps"], row["topk"]] = (metric["output_throughput"], metric["accept_length"])
            chain = {(h, k): v for (h, k, topk), v in cells.items() if topk == 1}
            probes = {}
            for head in {h for h, _ in chain}:
                k = max(one for h, one in chain if h == head)
                lengths = {one: chain[head, one][1] for h, one in chain if h == head}
                probes[head] = (k, _predicted(base, chain[head, k][0], k, lengths))
            speeds = {("", 0): base, **{arm: value[0] for arm, value in chain.items()}}
            chosen, launches = choose(speeds, probes)
            best, best_all = max(speeds.values()), max(base, *(v[0] for v in cells.values()))
            grid = MIN_LAUNCHES * (1 + len(cells))
            out.append(
                Choice(f"{model}, {task}", 1 - speeds[chosen] / best, 1 - speeds[chosen] / best_all, launches, grid)
            )
    return out


def _predicted(base: float, probe: float, k: int, lengths: Mapping[int, float]) -> tuple[Prediction, ...]:
    """Predictions from one probe: mean tokens a step up to each k are known from it, as from its p_i."""
    positions, known = [], 0.0
    for upper in sorted(lengths):
        room = upper - len(positions)
        share = (lengths[upper] - 1 - known) / room
        positions += [min(1.0, max(0.0, share))] * room
        known = lengths[upper] - 1
    drafts = 1_000_000
    counts = tuple(round(drafts * p) for p in positions)
    acceptance = Acceptance(drafts=drafts, drafted=drafts * k, accepted=sum(counts), accepted_per_position=counts)
    runs = [_run(base, None), _run(probe, acceptance)]
    return calibrated(predict(runs[0], runs[1], k, tuple(range(1, k + 1))), k, probe / base)


def _run(speed: float, acceptance: Acceptance | None) -> Run:
    tokens = (acceptance.drafts + acceptance.accepted + 1) if acceptance else 1
    return Run(
        concurrency=1, num_requests=1, failed=0, duration_s=1, output_tokens=tokens, throughput_tok_s=speed,
        ttft_ms_p50=1, ttft_ms_p99=1, tpot_ms_p50=1e3 / speed, tpot_ms_p99=1, itl_ms_p50=None, itl_ms_p99=None,
        e2e_latency_ms_p50=1, acceptance=acceptance,
    )  # fmt: skip


def of_curves(path: Path, seen: int) -> list[Choice]:
    """One choice a drafter, concurrency, kind of work and group of rounds, from curves that ``--measure`` wrote.

    surespec sees ``seen`` of the rounds, put together as one launch; the truth it is held against is of the others.
    """
    out = []
    for curve in json.loads(path.read_text(encoding="utf-8"))["curves"]:
        all_rounds = {int(k): [Run.model_validate(run) for run in runs] for k, runs in curve["runs"].items()}
        count = min(len(runs) for runs in all_rounds.values())
        for group in range(count // seen):
            mine = {group + i * (count // seen) for i in range(seen)}  # spread over the whole time, as launches are
            runs = {k: _pooled([r for i, r in enumerate(rounds) if i in mine]) for k, rounds in all_rounds.items()}
            others = {
                k: _pooled([r for i, r in enumerate(rounds[:count]) if i not in mine])
                for k, rounds in all_rounds.items()
            }
            speeds = {("", 0) if k == 0 else ("d", k): run.throughput_tok_s for k, run in runs.items()}
            truth = {("", 0) if k == 0 else ("d", k): speed for k, speed in _smooth(others).items()}
            raw = predict(runs[0], runs[PROBE_K], PROBE_K, candidate_ks(PROBE_K, runs[PROBE_K].acceptance))
            found = calibrated(raw, PROBE_K, runs[PROBE_K].throughput_tok_s / runs[0].throughput_tok_s)
            chosen, launches = choose(speeds, {"d": (PROBE_K, found)})
            lost = 1 - truth[chosen] / max(truth.values())
            of_grid = 1 - truth[max(speeds, key=lambda arm: speeds[arm])] / max(truth.values())
            name = f"{curve['method']}, {curve['prompts']}, concurrency {curve['concurrency']}, k = {chosen[1]}"
            best = max(truth, key=lambda arm: truth[arm])[1]
            out.append(Choice(f"{name} (best {best})", lost, lost, launches, MIN_LAUNCHES * len(speeds), of_grid))
    return out


def _pooled(rounds: list[Run]) -> Run:
    """Several short runs of one setting as one long run."""
    duration = sum(run.duration_s for run in rounds)
    tokens = sum(run.output_tokens for run in rounds)
    kept = [run.acceptance for run in rounds if run.acceptance is not None]
    acceptance = None
    if kept:
        acceptance = Acceptance(
            drafts=sum(one.drafts for one in kept),
            drafted=sum(one.drafted for one in kept),
            accepted=sum(one.accepted for one in kept),
            accepted_per_position=tuple(map(sum, zip(*(one.accepted_per_position for one in kept), strict=True))),
        )
    return rounds[0].model_copy(
        update={
            "num_requests": sum(run.num_requests for run in rounds),
            "failed": sum(run.failed for run in rounds),
            "duration_s": duration,
            "output_tokens": tokens,
            "throughput_tok_s": tokens / duration,
            "tpot_ms_p50": float(np.mean([run.tpot_ms_p50 for run in rounds])),
            "acceptance": acceptance,
        }
    )


def _smooth(runs: Mapping[int, Run]) -> dict[int, float]:
    """Tokens per second by k with the noise of single settings evened out.

    What is accepted at a k is the same in every round (greedy, same prompts), only the time of a step is noisy, and it
    rises evenly with k: so its logarithm is taken from a parabola through all k > 0.
    """
    ks = sorted(k for k in runs if k)
    steps = {k: _steps(runs[k]) for k in ks}
    fit = np.polynomial.Polynomial.fit(ks, [math.log(runs[k].duration_s / steps[k]) for k in ks], 2)
    return {0: runs[0].throughput_tok_s} | {k: runs[k].output_tokens / (steps[k] * math.exp(float(fit(k)))) for k in ks}


def _steps(run: Run) -> float:
    """Passes a sequence took, of all sequences together."""
    return run.output_tokens - (run.acceptance.accepted if run.acceptance else 0)


def measure(path: Path, num_prompts: int, output_len: int, rounds: int) -> None:
    """Measure the embedded engine's curves. One server a method changes its k in place, in another order every round,
    so that a slow minute of the machine does not fall on one k alone."""
    from surespec.bench.runner import BenchOptions, bench
    from surespec.engines import EngineSettings, make_engine
    from surespec.tune_plan import make_arm

    engine = make_engine("local", model="smollm2-135m", settings=EngineSettings(max_num_seqs=8))
    shuffle = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for method in ("ngram", "eagle3"):
        head = engine.drafter("smollm2-135m-eagle3") if method == "eagle3" else None
        server = engine.start(make_arm(method, LARGEST_K, head), path.with_suffix(".log"))
        curves: dict[tuple[str, int], dict[str, list[Any]]] = {}
        try:
            for number in range(rounds):
                print(f"measuring {method}, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
                for k in shuffle.permutation(LARGEST_K + 1).tolist():
                    _set_k(server.endpoint, k)
                    for prompts in ("chat", "copy"):
                        options = BenchOptions(
                            server.endpoint, concurrency=(1, 4, 8), prompts=prompts, num_prompts=num_prompts,
                            output_len=output_len,
                        )  # fmt: skip
                        for run in bench(options).runs:
                            slim = run.model_copy(update={"traces": ()}).model_dump(mode="json")
                            curves.setdefault((prompts, run.concurrency), {}).setdefault(str(k), []).append(slim)
        finally:
            server.stop()
        rows += [{"method": method, "prompts": p, "concurrency": c, "runs": runs} for (p, c), runs in curves.items()]
    path.write_text(json.dumps({"schema": "surespec/curves/2", "curves": rows}) + "\n", encoding="utf-8")


def _set_k(endpoint: str, k: int) -> None:
    """Change the k of a running embedded engine."""
    body = json.dumps({"num_speculative_tokens": k}).encode()
    request = Request(f"{endpoint}/surespec/speculation", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=30) as answer:
        answer.read()


def report(title: str, choices: list[Choice]) -> bool:
    """Print one table; whether the promises hold."""
    regret = np.array([c.regret for c in choices])
    every = np.array([c.regret_all for c in choices])
    launches, grid = sum(c.launches for c in choices), sum(c.grid for c in choices)
    share = float((regret <= WITHIN).mean())
    print(f"\n{title}: {len(choices)} choices")
    print(f"  within {WITHIN:.0%} of the best setting that surespec launches: {share:.1%} (worst {regret.max():.1%})")
    if (every != regret).any():
        print(f"  within {WITHIN:.0%} of the best of all, trees included: {float((every <= WITHIN).mean()):.1%}")
    grids = np.array([c.regret_grid for c in choices if c.regret_grid is not None])
    if len(grids):
        print(
            f"  a grid that saw the same launches: {float((grids <= WITHIN).mean()):.1%} within {WITHIN:.0%}; "
            f"mean loss {grids.mean():.1%}, surespec's {regret.mean():.1%}"
        )
    print(f"  launches: {launches}, a grid takes {grid}: {launches / grid:.0%}")
    for choice in sorted(choices, key=lambda c: -c.regret)[:3]:
        print(f"    {choice.regret:6.1%} lost: {choice.cell}")
    held = share >= 0.95 and launches <= grid / 3
    print(f"  {'holds' if held else 'FAILS'}: 95 % within {WITHIN:.0%}, a third of the launches")
    return held


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="SpecBundle's measurements as one JSON file")
    parser.add_argument("--curves", type=Path, help="curves of the embedded engine")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure those curves first and write them here")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9, help="how often each setting is measured")
    parser.add_argument("--seen", type=int, default=3, help="rounds that surespec sees as one launch")
    chosen = parser.parse_args()
    if chosen.measure:
        measure(chosen.measure, chosen.num_prompts, chosen.output_len, chosen.rounds)
    curves = chosen.curves or chosen.measure
    if chosen.data is None and curves is None:
        print(
            "Nothing to look at. --data takes SpecBundle's measurements (github.com/sgl-project/SpecForge publishes "
            "them) as one JSON file; --measure FILE measures this machine.",
            file=sys.stderr,
        )
        return 2
    held = True
    if chosen.data is not None:
        held &= report("SpecBundle (SGLang, EAGLE-3)", of_specbundle(chosen.data))
    if curves is not None:
        held &= report("the embedded engine on this machine", of_curves(curves, chosen.seen))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
