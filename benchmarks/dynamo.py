"""What Dynamo's frontend adds, and how far it and surespec's client scale. Real frontend, on this machine.

    python benchmarks/dynamo.py overhead [--launches 4] [--num-prompts 18]
    python benchmarks/dynamo.py scale [--requests 256]

``overhead``: the embedded engine served directly against the same behind Dynamo's frontend (one worker), launched in
turn (A B B A ...), the same prompts at concurrency 1. Printed: TTFT and TPOT of both, the difference in ms and the
ratio, paired by prompt, with a 95 % interval over launches and prompts.

``scale``: Dynamo's mocker (a clock instead of a model, drafts simulated with given acceptance) behind the frontend at
concurrency 1, 8, 64 and 256, with and without drafts. Printed: tokens a second and what one token costs the client in
CPU time, all threads; where CPU time times throughput reaches one core, the client is what is measured.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from surespec.bench.runner import BenchOptions, bench
from surespec.core import BASELINE, Run
from surespec.engines import EngineSettings, make_engine
from surespec.engines.dynamo import make_dynamo_mocker
from surespec.tune_plan import make_arm

MODEL = "smollm2-135m"
RATES = (0.8, 0.6, 0.4)
WIDTHS = (1, 8, 64, 256)


def overhead(launches: int, num_prompts: int, folder: Path) -> None:
    """Direct against through the frontend."""
    settings = EngineSettings(max_num_seqs=8, max_model_len=2048)
    engines = {kind: make_engine(kind, model=MODEL, settings=settings) for kind in ("local", "dynamo-local")}
    runs: dict[str, list[Run]] = {kind: [] for kind in engines}
    order = ["local", "dynamo-local", "dynamo-local", "local"] * math.ceil(launches / 2)
    for kind in order[: 2 * launches]:
        print(f"measuring {kind}", file=sys.stderr, flush=True)
        server = engines[kind].start(BASELINE, folder / f"{kind}.log")
        try:
            options = BenchOptions(server.endpoint, concurrency=(1,), num_prompts=num_prompts, output_len=48)
            runs[kind] += bench(options).runs
        finally:
            server.stop()
    print(f"{launches} launches each, {num_prompts} prompts, concurrency 1, the embedded engine without speculation")
    for name in ("ttft_ms", "tpot_ms"):
        values = {
            kind: np.array([[getattr(t, name) for t in run.traces] for run in found], float)
            for kind, found in runs.items()
        }
        ratio, low, high = _ratio(values["local"], values["dynamo-local"])
        medians = {kind: statistics.median(v.ravel().tolist()) for kind, v in values.items()}
        added = medians["dynamo-local"] - medians["local"]
        print(
            f"  {name}: direct {medians['local']:.2f}, through Dynamo {medians['dynamo-local']:.2f} "
            f"({added:+.2f} ms), ratio {ratio:.3f} [{low:.3f}, {high:.3f}]"
        )


def _ratio(direct: np.ndarray, through: np.ndarray) -> tuple[float, float, float]:
    """Ratio of the geometric means, paired by prompt, with a bootstrap interval over launches and prompts."""
    rng = np.random.default_rng(1)
    a, b = np.log(direct), np.log(through)
    drawn = []
    for _ in range(2000):
        prompts = rng.integers(0, a.shape[1], a.shape[1])
        means = [x[rng.integers(0, len(x), len(x))][:, prompts].mean() for x in (a, b)]
        drawn.append(means[1] - means[0])
    low, high = np.exp(np.percentile(drawn, (2.5, 97.5)))
    return float(np.exp(b.mean() - a.mean())), float(low), float(high)


def scale(requests: int, folder: Path) -> None:
    """The mocker behind the frontend."""
    settings = EngineSettings(max_num_seqs=256)
    engine = make_dynamo_mocker(MODEL, RATES, settings)
    print(f"the mocker behind the real frontend, acceptance {RATES} (given the ones before)")
    print(f"{'':<10}{'concurrency':>12}{'tok/s':>10}{'failed':>8}{'client CPU us/token':>21}{'client cores':>14}")
    for arm in (BASELINE, make_arm("ngram", len(RATES))):
        server = engine.start(arm, folder / f"{arm.name}.log")
        try:
            for width in WIDTHS:
                count = max(16, min(requests, 4 * width))
                options = BenchOptions(
                    server.endpoint, concurrency=(width,), prompts="chat", num_prompts=count, output_len=64,
                    ignore_eos=True, warmup=False, metrics_endpoints=server.metrics_endpoints,
                )  # fmt: skip
                cpu = time.process_time()
                (run,) = bench(options).runs
                cpu = time.process_time() - cpu
                each = cpu / max(1, run.output_tokens)
                name = "drafts" if arm.num_speculative_tokens else "none"
                print(
                    f"{name:<10}{width:>12}{run.throughput_tok_s:>10.0f}{run.failed:>8}{each * 1e6:>21.0f}"
                    f"{each * run.throughput_tok_s:>14.2f}"
                )
        finally:
            server.stop()


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("overhead", "scale"))
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=18)
    parser.add_argument("--requests", type=int, default=1024)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if chosen.what == "overhead":
            overhead(chosen.launches, chosen.num_prompts, Path(name))
        else:
            scale(chosen.requests, Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
