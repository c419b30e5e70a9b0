"""Is speculation by a schedule never slower than none? The embedded engine, measured.

    python benchmarks/schedule.py [--method eagle3] [--prompts chat] [--rounds 3] [--launches 2]

Arms: no speculation, static k = 1, 3, 5, and the table that ``surespec schedule`` makes of one probe at k = 5. Three
servers live side by side (without speculation, with k = 5 lowered in place, with the table); one works at a time. In a
round each arm is measured once at each concurrency, in another order every round, so that a slow minute of the machine
does not fall on one arm alone; every launch starts the three servers anew. Printed: the geometric mean over rounds of
the throughput beside no speculation, with its standard error. Promised: at least 0.98 of the best static k at
concurrency 1, at least 0.98 of the baseline at 8 and 16.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from urllib.request import Request, urlopen

from surespec.bench.runner import BenchOptions, bench
from surespec.core import BASELINE, Arm, Run
from surespec.engines import EngineSettings, make_engine
from surespec.predict import candidate_ks
from surespec.rules import load_topic
from surespec.schedule import as_vllm, most_k, point, table
from surespec.tune_plan import PROBE_K, make_arm

WIDTHS = (1, 4, 8, 16)
STATIC = (1, 3, 5)
ARMS = ("none", *(f"k = {k}" for k in STATIC), "schedule")
PROMISED = 0.98


def main() -> int:
    """Measure and print; the exit code says whether the promises hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="ngram", choices=("ngram", "eagle3"))
    parser.add_argument("--prompts", default="mixed")
    parser.add_argument("--num-prompts", type=int, default=9, help="at least; twice the concurrency where that is more")
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3, help="rounds a launch")
    parser.add_argument("--launches", type=int, default=2)
    chosen = parser.parse_args()
    engine = make_engine("local", model="smollm2-135m", settings=EngineSettings(max_num_seqs=max(WIDTHS)))
    head = engine.drafter("smollm2-135m-eagle3") if chosen.method == "eagle3" else None

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def measured(endpoint: str, width: int) -> Run:
        options = BenchOptions(
            endpoint, concurrency=(width,), prompts=chosen.prompts, num_prompts=max(chosen.num_prompts, 2 * width),
            output_len=chosen.output_len,
        )  # fmt: skip
        return bench(options).runs[0]

    static = make_arm(chosen.method, max(STATIC), head)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def started(arm: Arm, stack: ExitStack) -> str:
            server = engine.start(arm, folder / f"{arm.name}.log")
            stack.callback(server.stop)
            return server.endpoint

        with ExitStack() as stack:
            say("measuring what the table is made of: no speculation and a probe")
            ends = started(BASELINE, stack), started(make_arm(chosen.method, PROBE_K, head), stack)
            runs = [
                ([measured(end, width) for end in ends], [measured(end, width) for end in reversed(ends)])
                for width in WIDTHS
            ]
        ks = candidate_ks(PROBE_K, runs[0][0][1].acceptance)
        found = [point(pooled(a[0], b[1]), pooled(a[1], b[0]), PROBE_K, ks) for a, b in runs]
        rows = table([p for p in found if p is not None], idle_cost=load_topic("schedules")["local"]["idle_cost"])
        print("the table:", as_vllm(rows), flush=True)
        if most_k(rows) == 0:
            print("no batch size gains from drafting, so the schedule is to leave it off: nothing to measure")
            return 0
        arm = make_arm(chosen.method, most_k(rows), head)
        config = {**(arm.speculative_config or {}), "num_speculative_tokens_per_batch_size": as_vllm(rows)}
        scheduled = arm.model_copy(update={"name": "schedule", "speculative_config": config})
        logs: dict[tuple[str, int], list[float]] = defaultdict(list)
        shuffle = random.Random(1)
        for launch in range(chosen.launches):
            with ExitStack() as stack:
                ends_of = {"none": started(BASELINE, stack), "schedule": started(scheduled, stack)}
                switched = started(static, stack)
                for number in range(chosen.rounds):
                    say(f"launch {launch + 1} of {chosen.launches}, round {number + 1} of {chosen.rounds}")
                    for width in shuffle.sample(WIDTHS, len(WIDTHS)):
                        speeds = {}
                        for label in shuffle.sample(ARMS, len(ARMS)):
                            if label not in ends_of:
                                set_k(switched, int(label.removeprefix("k = ")))
                            speeds[label] = measured(ends_of.get(label, switched), width).throughput_tok_s
                        for label, speed in speeds.items():
                            logs[label, width].append(math.log(speed / speeds["none"]))
    print(f"\nthroughput beside no speculation ({chosen.method}, {chosen.prompts}, {len(logs['none', 1])} rounds)")
    print(f"{'':<10}" + "".join(f"{'c' + str(w):>16}" for w in WIDTHS))
    for label in ARMS:
        print(f"{label:<10}" + "".join(f"{cell(logs[label, w]):>16}" for w in WIDTHS))
    best = max(STATIC, key=lambda k: statistics.mean(logs[f"k = {k}", 1]))
    rivals = logs[f"k = {best}", 1] if statistics.mean(logs[f"k = {best}", 1]) > 0 else logs["none", 1]
    promises = {
        "of the best static k (or none) at concurrency 1": [
            a - b for a, b in zip(logs["schedule", 1], rivals, strict=True)
        ],
        "of no speculation at 8": logs["schedule", 8],
        "of no speculation at 16": logs["schedule", 16],
    }
    held = True
    for promise, values in promises.items():
        ok = math.exp(statistics.mean(values)) >= PROMISED
        held &= ok
        print(f"{'holds' if ok else 'FAILS'} ({cell(values).strip()}): at least {PROMISED} {promise}")
    return 0 if held else 1


def cell(values: list[float]) -> str:
    """Geometric mean and standard error of log ratios."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{math.exp(statistics.mean(values)):.2f} +- {error:.3f}"


def pooled(first: Run, second: Run) -> Run:
    """Two runs of one setting as one: their mean speed, with the acceptance of the first."""
    speed = math.sqrt(first.throughput_tok_s * second.throughput_tok_s)
    tpot = math.sqrt((first.tpot_ms_p50 or 1.0) * (second.tpot_ms_p50 or 1.0))
    return first.model_copy(update={"throughput_tok_s": speed, "tpot_ms_p50": tpot})


def set_k(endpoint: str, k: int) -> None:
    """Change the k of a running embedded engine."""
    body = json.dumps({"num_speculative_tokens": k}).encode()
    request = Request(f"{endpoint}/surespec/speculation", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=30) as answer:
        answer.read()


if __name__ == "__main__":
    sys.exit(main())
