"""Is speculation by a schedule never slower than none? The embedded engine, measured.

    python benchmarks/schedule.py [--prompts mixed] [--launches 2]

Arms: no speculation, static k = 1, 3, 5, and the table that ``surespec schedule`` makes of one probe at k = 5, each
launched in turn (A B C ... C B A). Printed: throughput beside no speculation, and for the schedule beside the best k at
concurrency 1. Promised: at least 0.98 of the best static k at concurrency 1, at least 0.98 of the baseline at 8 and 16.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from surespec.bench.runner import BenchOptions, bench
from surespec.core import BASELINE, Arm, BenchResult, Run
from surespec.engines import EngineSettings, make_engine
from surespec.predict import candidate_ks
from surespec.rules import load_topic
from surespec.schedule import as_vllm, most_k, point, table
from surespec.tune_plan import PROBE_K, make_arm

WIDTHS = (1, 4, 8, 16)
STATIC = (1, 3, 5)


def main() -> int:
    """Measure and print; the exit code says whether the promises hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="ngram", choices=("ngram", "eagle3"))
    parser.add_argument("--prompts", default="mixed")
    parser.add_argument("--num-prompts", type=int, default=18)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--launches", type=int, default=2)
    chosen = parser.parse_args()
    engine = make_engine("local", model="smollm2-135m", settings=EngineSettings(max_num_seqs=max(WIDTHS)))
    head = engine.drafter("smollm2-135m-eagle3") if chosen.method == "eagle3" else None

    def measured(arm: Arm, folder: Path) -> BenchResult:
        print(f"measuring {arm.name}", file=sys.stderr, flush=True)
        server = engine.start(arm, folder / "server.log")
        try:
            return bench(
                BenchOptions(
                    server.endpoint, concurrency=WIDTHS, prompts=chosen.prompts, num_prompts=chosen.num_prompts,
                    output_len=chosen.output_len,
                )
            )  # fmt: skip
        finally:
            server.stop()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, probe = measured(BASELINE, folder), measured(make_arm(chosen.method, PROBE_K, head), folder)
        ks = candidate_ks(PROBE_K, at(probe, 1).acceptance)
        points = [found for w in WIDTHS if (found := point(at(base, w), at(probe, w), PROBE_K, ks)) is not None]
        rows = table(points, idle_cost=load_topic("schedules")["local"]["idle_cost"])
        print("the table:", as_vllm(rows))
        if most_k(rows) == 0:
            print("no batch size gains from drafting, so the schedule is to leave it off: nothing to measure")
            return 0
        arm = make_arm(chosen.method, most_k(rows), head)
        config = {**(arm.speculative_config or {}), "num_speculative_tokens_per_batch_size": as_vllm(rows)}
        arms = {"none": BASELINE, **{f"k = {k}": make_arm(chosen.method, k, head) for k in STATIC}}
        arms["schedule"] = arm.model_copy(update={"name": "schedule", "speculative_config": config})
        speeds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        order = [*arms, *reversed(arms)] * ((chosen.launches + 1) // 2)
        for label in order[: len(arms) * chosen.launches]:
            for run in measured(arms[label], folder).runs:
                speeds[label][run.concurrency].append(run.throughput_tok_s)
    mean = {label: {w: statistics.geometric_mean(v) for w, v in by.items()} for label, by in speeds.items()}
    print(f"\ntokens per second beside no speculation ({chosen.method}, {chosen.prompts}, {chosen.launches} launches)")
    print(f"{'':<10}" + "".join(f"{'c' + str(w):>8}" for w in WIDTHS))
    for label, by in mean.items():
        print(f"{label:<10}" + "".join(f"{by[w] / mean['none'][w]:>8.2f}" for w in WIDTHS))
    best = max(mean[label][1] for label in mean if label.startswith("k ="))
    promises = {
        "at least 0.98 of the best static k at concurrency 1": mean["schedule"][1] / max(best, mean["none"][1]),
        "at least 0.98 of no speculation at 8": mean["schedule"][8] / mean["none"][8],
        "at least 0.98 of no speculation at 16": mean["schedule"][16] / mean["none"][16],
    }
    for promise, ratio in promises.items():
        print(f"{'holds' if ratio >= 0.98 else 'FAILS'} ({ratio:.3f}): {promise}")
    return 0 if min(promises.values()) >= 0.98 else 1


def at(result: BenchResult, width: int) -> Run:
    """The run at a concurrency."""
    return next(run for run in result.runs if run.concurrency == width)


if __name__ == "__main__":
    sys.exit(main())
