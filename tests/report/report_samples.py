"""Launches and judgements made by hand, small enough to check by eye."""

from __future__ import annotations

from surespec.core import BASELINE, Acceptance, Arm, Interval, Judgement, Launch, Ratios, Run, Trace

EAGLE = Arm(
    name="eagle3-k3",
    method="eagle3",
    num_speculative_tokens=3,
    speculative_config={"method": "eagle3", "model": "smollm2-135m-eagle3", "num_speculative_tokens": 3},
)
NGRAM = Arm(name="ngram-k5", method="ngram", num_speculative_tokens=5)
SUFFIX = Arm(name="suffix-k8", method="suffix", num_speculative_tokens=8)
DRAFT = Arm(name="draft-k2", method="draft_model", num_speculative_tokens=2)
ARMS = (BASELINE, EAGLE, NGRAM, DRAFT, SUFFIX)
CATEGORIES = {"chat": 1.25, "code": 1.5, "copy": 2.9, "extraction": 1.8, "reasoning": 1.3, "multilingual": 0.9}
PER_POSITION = {"eagle3-k3": (60, 33, 18), "ngram-k5": (35, 28, 22, 17, 14)}


def acceptance(arm: str) -> Acceptance | None:
    counts = PER_POSITION.get(arm)
    if counts is None:
        return None
    return Acceptance(drafts=100, drafted=100 * len(counts), accepted=sum(counts), accepted_per_position=counts)


def traces(arm: str, factor: float) -> tuple[Trace, ...]:
    """Four prompts a category; TPOT 20 ms without speculation, less by the category's speed-up with it."""
    made = []
    for category, speedup in CATEGORIES.items():
        for i in range(4):
            gain = 1.0 if arm == "baseline" else speedup * (1 + 0.04 * (i - 1.5))
            tpot = 20.0 * factor / gain
            made.append(
                Trace(
                    prompt_id=f"{category}-{i}",
                    category=category,
                    start_s=float(i),
                    ok=True,
                    output_tokens=64,
                    chunks=40,
                    ttft_ms=80.0,
                    tpot_ms=tpot,
                    e2e_latency_ms=80.0 + 63 * tpot,
                    text="the answer of the model",
                )
            )
    return tuple(made)


def run(arm: str, concurrency: int, throughput: float, *, failed: int = 0, with_traces: bool = True) -> Run:
    tpot = 1000.0 * concurrency / throughput
    return Run(
        concurrency=concurrency,
        num_requests=24,
        failed=failed,
        duration_s=24 * 64 / throughput,
        output_tokens=24 * 64,
        throughput_tok_s=throughput,
        ttft_ms_p50=80.0 + 5 * concurrency,
        ttft_ms_p99=140.0,
        tpot_ms_p50=tpot,
        tpot_ms_p99=2 * tpot,
        itl_ms_p50=25.0,
        itl_ms_p99=60.0,
        e2e_latency_ms_p50=80 + 63 * tpot,
        acceptance=acceptance(arm),
        traces=traces(arm, concurrency**0.5) if with_traces else (),
    )


def launch(index: int, arm: str, at_s: int, speeds: dict[int, float], *, with_traces: bool = True) -> Launch:
    return Launch(
        index=index,
        arm=arm,
        status="ok",
        started_at=f"2026-12-02T10:{at_s // 60:02d}:{at_s % 60:02d}+00:00",
        start_duration_s=4.0,
        command=f"surespec serve --model smollm2-135m  # {arm}",
        runs=tuple(run(arm, c, speed, with_traces=with_traces) for c, speed in speeds.items()),
    )


def failed_launch(index: int, arm: str, at_s: int, failure: str) -> Launch:
    return Launch(
        index=index,
        arm=arm,
        status="failed",
        started_at=f"2026-12-02T10:{at_s // 60:02d}:{at_s % 60:02d}+00:00",
        start_duration_s=6.0,
        failure=failure,
    )


def tuning(*, with_traces: bool = True) -> tuple[Launch, ...]:
    """Baseline and eagle3 in the order A B B A, with an n-gram arm and one that did not start."""
    return (
        launch(0, "baseline", 0, {1: 50.0, 8: 210.0}, with_traces=with_traces),
        launch(1, "ngram-k5", 50, {1: 55.0, 8: 190.0}, with_traces=with_traces),
        failed_launch(2, "draft-k2", 98, "the draft model has another vocabulary (32000, target 49152)."),
        launch(3, "eagle3-k3", 106, {1: 71.0, 8: 224.0}, with_traces=with_traces),
        launch(4, "eagle3-k3", 142, {1: 73.0, 8: 222.0}, with_traces=with_traces),
        launch(5, "baseline", 178, {1: 51.0, 8: 211.0}, with_traces=with_traces),
    )


RATIOS = {
    "c1": Ratios(
        throughput_tok_s=Interval(estimate=1.426, low=1.37, high=1.481),
        tpot_ms_p50=Interval(estimate=0.70, low=0.67, high=0.732),
    ),
    "c8": Ratios(
        throughput_tok_s=Interval(estimate=1.059, low=0.99, high=1.131),
        tpot_ms_p50=Interval(estimate=0.944, low=0.90, high=0.991),
    ),
}
COMMAND = (
    "surespec serve --model smollm2-135m --speculative-config "
    '\'{"method": "eagle3", "model": "smollm2-135m-eagle3", "num_speculative_tokens": 3}\''
)


def kept() -> Judgement:
    return Judgement(
        verdict="keep",
        policy="jetson",
        why=(
            "One user gets at least 1.37 times the tokens per second and waits at least 26.8 % less for each token. "
            "With eight users at a time nothing is lost."
        ),
        arm="eagle3-k3",
        speculative_config=EAGLE.speculative_config,
        command=COMMAND,
        ratios=RATIOS,
        lossless=True,
        lossless_detail="24 of 24 prompts gave the same text in every launch.",
        launches=tuning(),
        assumptions=("a launch-to-launch variation of 3 %, as two launches an arm cannot measure it well",),
    )


def manifest() -> dict[str, object]:
    return {
        "schema": "surespec/bundle/1",
        "created_at": "2026-12-02T10:00:00+00:00",
        "surespec_version": "0.1.0",
        "command": "surespec tune --model smollm2-135m --concurrency 1,8 --out demo",
        "options": {"model": "smollm2-135m", "concurrency": [1, 8], "policy": "jetson", "api_key": "sk-very-secret"},
        "machine": {"system": "Linux 6.8 x86_64", "cpu": {"model": "AMD EPYC", "physical_cores": 2}, "memory_gb": 24},
    }
