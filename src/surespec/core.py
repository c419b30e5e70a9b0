"""The nouns every module shares. All are frozen; units stand in the field names.

Definitions, stated in every report (``DEFINITIONS``): TTFT is the time from sending a request to its first token;
TPOT is (E2E - TTFT) / (n - 1) for one request, n taken from the server's ``usage``; ITL is the gap between *chunks*,
and because a chunk of a speculating server holds several tokens, ITL decides nothing here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFINITIONS: dict[str, str] = {
    "TTFT": "time from sending a request to its first token",
    "TPOT": "(E2E - TTFT) / (n - 1) per request, with n output tokens as counted by the server",
    "ITL": "gap between streamed chunks; a chunk may hold several tokens, so it decides nothing",
    "throughput_tok_s": "all output tokens of a run divided by the wall time of its measured window",
    "acceptance length": "mean tokens a step: 1 + accepted / drafts",
    "acceptance rate": "accepted / drafted tokens",
    "p_i": "share of drafts whose first i tokens were all accepted",
    "ratio": "candidate / baseline, paired by prompt, with an interval (95 % or more, see docs/statistics.md)",
}

VerdictName = Literal["keep", "marginal", "disable", "inconclusive", "not_lossless", "failed"]
EXIT_CODES: dict[str, int] = {
    "keep": 0,
    "disable": 10,
    "marginal": 11,
    "inconclusive": 11,
    "not_lossless": 12,
    "failed": 1,
}


class Noun(BaseModel):
    """Base of all nouns: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _is_count(value: object) -> bool:
    """What a counter can hold: a number too large for a float would fail where a rate is made of it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63


class Acceptance(Noun):
    """What became of the drafts of a run (or of one request), in tokens.

    ``accepted_per_position[i]`` counts the drafts whose first i + 1 tokens were all accepted, so its sum is
    ``accepted``. ``rate``, ``length`` and ``per_position`` (the p_i) are derived from the counts.
    """

    drafts: int
    drafted: int
    accepted: int
    accepted_per_position: tuple[int, ...] = ()
    rate: float = 0.0
    length: float = 1.0
    per_position: tuple[float, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> Any:
        """The derived fields always follow from the counts, whatever a file says."""
        if isinstance(data, dict) and {"drafts", "drafted", "accepted"} <= data.keys():
            drafts, drafted, accepted = data["drafts"], data["drafted"], data["accepted"]
            counts = data.get("accepted_per_position") or ()
            if not isinstance(counts, list | tuple) or not all(
                _is_count(n) for n in (drafts, drafted, accepted, *counts)
            ):
                raise ValueError("its counts must be whole numbers from 0 on")
            data = {
                **data,
                "rate": accepted / drafted if drafted else 0.0,
                "length": 1.0 + accepted / drafts if drafts else 1.0,
                "per_position": tuple(c / drafts for c in counts) if drafts else tuple(0.0 for _ in counts),
            }
        return data

    def __add__(self, other: Acceptance) -> Acceptance:
        """Pool two records (counts add; a shorter per-position list counts as zeros)."""
        width = max(len(self.accepted_per_position), len(other.accepted_per_position))
        mine = self.accepted_per_position + (0,) * (width - len(self.accepted_per_position))
        theirs = other.accepted_per_position + (0,) * (width - len(other.accepted_per_position))
        return Acceptance(
            drafts=self.drafts + other.drafts,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            accepted_per_position=tuple(a + b for a, b in zip(mine, theirs, strict=True)),
        )


class Trace(Noun):
    """One request of a run. Times in milliseconds; ``start_s`` counts from the start of the run's measured window.

    ``tpot_ms`` is None when fewer than two tokens came; all timings are None when the request failed.
    """

    prompt_id: str
    category: str
    start_s: float
    ok: bool
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunks: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_latency_ms: float | None = None
    finish_reason: str = ""
    text: str = ""
    acceptance: Acceptance | None = None


class CategoryStats(Noun):
    """One workload category inside a run."""

    num_requests: int
    output_tokens: int
    tpot_ms_p50: float | None
    acceptance: Acceptance | None


class Run(Noun):
    """One benchmark of a launch at one concurrency. Failed requests are counted, never averaged in.

    None stands for unknown: TPOT needs a request of two tokens or more, ITL two chunks or more, and other tools' files
    leave latencies out.
    """

    concurrency: int
    num_requests: int
    failed: int
    duration_s: float
    output_tokens: int
    throughput_tok_s: float
    ttft_ms_p50: float | None
    ttft_ms_p90: float | None = None
    ttft_ms_p99: float | None
    tpot_ms_p50: float | None
    tpot_ms_p90: float | None = None
    tpot_ms_p99: float | None
    itl_ms_p50: float | None
    itl_ms_p90: float | None = None
    itl_ms_p99: float | None
    e2e_latency_ms_p50: float | None
    e2e_latency_ms_p90: float | None = None
    e2e_latency_ms_p99: float | None = None
    tokens_per_chunk: float = 1.0
    acceptance: Acceptance | None = None
    by_category: dict[str, CategoryStats] = {}
    traces: tuple[Trace, ...] = ()


class Workload(Noun):
    """What was sent: enough to send it again. ``prompts`` is a built-in set's name or a file's name."""

    prompts: str
    num_prompts: int
    output_len: int
    input_len: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    categories: tuple[str, ...] = ()


class BenchResult(Noun):
    """The document of ``surespec bench`` (schema ``surespec/bench/1``)."""

    schema_: Literal["surespec/bench/1"] = "surespec/bench/1"
    endpoint: str
    model: str
    workload: Workload | None = None
    runs: tuple[Run, ...]
    acceptance: Acceptance | None = None
    warnings: tuple[str, ...] = ()
    source: str = "surespec"
    started_at: str = ""

    @model_validator(mode="before")
    @classmethod
    def _schema_key(cls, data: Any) -> Any:
        """``schema`` is a reserved name in pydantic, so the field is ``schema_`` and the JSON key ``schema``."""
        if isinstance(data, dict) and "schema" in data:
            data = {**data, "schema_": data["schema"]}
            del data["schema"]
        return data

    def document(self) -> dict[str, Any]:
        """The JSON document, with its ``schema`` first."""
        body = self.model_dump(mode="json")
        return {"schema": body.pop("schema_"), **body}


class Arm(Noun):
    """One configuration under test. The baseline has method ``none``, k = 0 and no speculative config."""

    name: str
    method: str
    num_speculative_tokens: int = Field(default=0, ge=0, le=1024)
    speculative_config: dict[str, Any] | None = None

    @property
    def is_baseline(self) -> bool:
        """True for the arm without speculation."""
        return self.method == "none"


BASELINE = Arm(name="baseline", method="none")


class Gap(Noun):
    """How far the baseline's best token is ahead of its second (``nats``), where another text leaves the baseline's at
    character ``position``. Near 0: a tie that rounding decides."""

    prompt_id: str
    position: int
    nats: float


class Launch(Noun):
    """One server life of an arm, with what was measured in it. Times are UTC ISO strings and seconds.

    ``failure_kind`` is of ``rules/failures.toml``; ``tried`` names the remedies it was launched with; ``remains`` says
    what a person can still try. ``gaps`` are of a baseline that was asked again where other texts had left its own.
    """

    index: int
    arm: str
    status: Literal["ok", "failed", "interrupted"]
    started_at: str
    start_duration_s: float = 0.0
    command: str = ""
    failure: str = ""
    failure_kind: str = ""
    tried: tuple[str, ...] = ()
    remains: tuple[str, ...] = ()
    log: str = ""
    runs: tuple[Run, ...] = ()
    gaps: tuple[Gap, ...] = ()
    warnings: tuple[str, ...] = ()


class Interval(Noun):
    """An estimate with the ends of its interval (95 % unless said otherwise)."""

    estimate: float
    low: float
    high: float


class Ratios(Noun):
    """Candidate / baseline at one concurrency."""

    throughput_tok_s: Interval
    tpot_ms_p50: Interval


class Policy(Noun):
    """When a speculation setting is kept. Gains and reductions are fractions (0.30 = 30 %).

    ``keep_*``: both must be passed by the weak end of the interval at concurrency 1 (``None``: not asked for).
    ``disable_gain``: disable when the strong end of the throughput gain at concurrency 1 is below it.
    ``load_concurrency`` with ``load_keep_floor``: the weak end of the throughput ratio there must be at least the floor
    to keep; disable when the whole interval is below 1.
    """

    name: str
    description: str
    source: str
    keep_throughput_gain: float | None = None
    keep_tpot_reduction: float | None = None
    disable_gain: float
    load_concurrency: int | None = None
    load_keep_floor: float


class Judgement(Noun):
    """What ``judge`` and ``tune`` answer (schema ``surespec/judge/1`` and ``surespec/tune/1``).

    ``ratios`` is keyed ``c1``, ``c8`` ...; ``why`` is two sentences a newcomer understands; ``lossless`` is None when
    texts were not compared. ``assumptions`` names what the verdict rests on and was not measured.
    ``confidence`` is that of the intervals in ``ratios`` (see ``stats.look_confidence``); ``stopped`` says why no more
    was launched. ``gpu_memory_utilization`` is
    what the arm needed to start, where that is not the deployment's own.
    """

    verdict: VerdictName
    policy: str
    why: str
    arm: str | None = None
    speculative_config: dict[str, Any] | None = None
    gpu_memory_utilization: float | None = None
    command: str = ""
    ratios: dict[str, Ratios] = {}
    confidence: float = 0.95
    stopped: str = ""
    lossless: bool | None = None
    lossless_detail: str = ""
    launches: tuple[Launch, ...] = ()
    report: str = ""
    warnings: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The documented exit code of the verdict."""
        return EXIT_CODES[self.verdict]

    def document(self, noun: Literal["judge", "tune"]) -> dict[str, Any]:
        """The JSON document of ``surespec judge`` or ``surespec tune``; traces stay in the bundle."""
        body = self.model_dump(mode="json")
        for launch in body["launches"]:
            for run in launch["runs"]:
                run.pop("traces", None)
        return {"schema": f"surespec/{noun}/1", **body}
