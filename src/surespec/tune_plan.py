"""What ``tune`` is asked for and what it is going to do about it: options, arms, workload, expected duration."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from surespec.bench.workload import load_workload
from surespec.core import BASELINE, Arm
from surespec.dialects.vllm import NGRAM_LOOKUP
from surespec.engines import ENGINES, Engine, EngineSettings, make_engine, takers
from surespec.engines.base import shell_text
from surespec.engines.from_recipe import RecipeEngine, own_arm, recipe_engine
from surespec.engines.pace import Pace
from surespec.errors import ConfigError, UsageError
from surespec.lossless import lossy_settings
from surespec.recipe.read import read_recipe
from surespec.rules import policy as find_policy
from surespec.tune_drafters import KnownDrafters, known_drafters

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_NUM_PROMPTS = 27  # three of each category of the built-in mix
DEFAULT_OUTPUT_LEN = 64
PROBE_K = 5
"""Drafters are probed at this k: it gives the p_i of every smaller one (rule C1 starts there too)."""

DRAFT_MODEL_PROBE_K = 4  # rule C2
MIN_LAUNCHES = 2
MAX_LAUNCHES = 6
LARGEST_BATCH = 1024
ALONE = "-alone"
METHODS = ("ngram", "eagle3", "draft_model")


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What to tune and with what. None means: chosen for you (``num_prompts``, ``output_len``), or found by the model's
    name (``eagle3_head``), or none (``draft_model``). ``methods`` limits the drafters tried. ``engine_python`` and
    ``engine_program`` are the interpreter or the program of an engine, ``max_model_len`` its context in tokens.
    ``recipe`` is the file (absolute) whose deployment is tuned, ``service`` one of several in it; they say model and
    engine. ``managed``: a person starts each arm at ``endpoint``. ``stop_existing``: stop a server that runs already,
    and start it again at the end; ``apply``: leave the new arm in its place when the verdict is keep.

    ``max_launches`` is the most launches of the baseline and of the finalist; ``budget_s`` the time after which no
    further launch begins; ``timeout_s`` how long a request may take.
    """

    model: str = DEFAULT_MODEL
    engine: str = "local"
    recipe: str | None = None
    service: str | None = None
    precision: str = "fp32"
    concurrency: tuple[int, ...] = (1, 8)
    policy: str = "jetson"
    prompts: str = "mixed"
    num_prompts: int | None = None
    output_len: int | None = None
    temperature: float = 0.0
    draft_model: str | None = None
    eagle3_head: str | None = None
    methods: tuple[str, ...] | None = None
    engine_python: str | None = None
    engine_program: str | None = None
    managed: bool = False
    endpoint: str | None = None
    max_model_len: int | None = None
    budget_s: float = 1200.0
    timeout_s: float = 600.0
    max_launches: int = MAX_LAUNCHES
    out: Path = Path("surespec-run")
    resume: bool = False
    stop_existing: bool = False
    apply: bool = False
    workers: int = 1
    router_mode: str = "round-robin"
    discovery: str = "file"
    roll: bool = False

    def check(self) -> None:
        """Raise UsageError for what cannot be done, before anything is launched."""
        dynamos = self.workers != 1 or self.roll or self.router_mode != "round-robin" or self.discovery != "file"
        if dynamos and not self.engine.startswith("dynamo"):
            raise UsageError(
                f"--workers, --router-mode, --discovery and --roll are Dynamo's, and --engine is {self.engine}.",
                hint="Leave them out, or choose --engine dynamo or dynamo-local.",
            )
        find_policy(self.policy)
        if self.engine not in ENGINES:
            raise ConfigError(f"--engine {self.engine}: there is no such engine.", hint=f"Known: {', '.join(ENGINES)}.")
        if self.recipe is not None:
            for flag, value in (
                ("--engine-python", self.engine_python),
                ("--engine-program", self.engine_program),
                ("--max-model-len", self.max_model_len),
            ):
                if value is not None:
                    raise UsageError(f"{flag} {value}: with --recipe the recipe says it.", hint="Change it there.")
        for flag, value in (("--engine-python", self.engine_python), ("--engine-program", self.engine_program)):
            if value is not None and self.engine not in (engines := takers(flag)):
                raise UsageError(f"{flag} is for --engine {' or '.join(engines)}, not {self.engine}.")
        if self.managed != (self.endpoint is not None):
            raise UsageError(
                "--managed and --endpoint belong together: the server there is started by you for each arm.",
                hint="Give both, or neither.",
            )
        if self.managed and self.engine != "vllm" and self.recipe is None:
            raise UsageError(f"--managed with --engine {self.engine}: it can say the commands of vLLM only.")
        if self.apply and not self.stop_existing:
            raise UsageError(
                "--apply leaves the new setting running in the place of a server that --stop-existing has stopped.",
                hint="Give both, or neither; for a recipe file there is surespec apply.",
            )
        if self.stop_existing and (self.managed or self.engine == "local"):
            why = "you manage the server" if self.managed else "the embedded engine runs beside other servers"
            raise UsageError(f"--stop-existing is for engines that surespec launches; here {why}.")
        if 1 not in self.concurrency:
            raise UsageError(
                f"--concurrency {','.join(map(str, self.concurrency))}: 1 is missing, and every verdict is made there.",
                hint="Use --concurrency 1,8, or 1 alone for a single user.",
            )
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out {self.out} is a file.", hint="Name a new folder.")
        if self.budget_s <= 0:
            raise UsageError(f"--budget must be above 0 seconds, not {self.budget_s:g}.", hint="Example: --budget 20m")
        if self.max_launches < MIN_LAUNCHES:
            raise UsageError(f"max_launches must be at least {MIN_LAUNCHES}, not {self.max_launches}.")
        unknown = [method for method in self.methods or () if method not in METHODS]
        if unknown:
            raise UsageError(f"There is no method {unknown[0]!r} to try.", hint=f"Known: {', '.join(METHODS)}.")

    def stored(self) -> dict[str, Any]:
        """What a bundle's manifest keeps of them: all but where and how long."""
        kept = asdict(self)
        for name in ("out", "resume", "budget_s", "timeout_s", "stop_existing", "apply"):
            del kept[name]
        return kept

    def restored(self, stored: dict[str, Any]) -> TuneOptions:
        """These options with those of a bundle to be resumed, which win. Raises ConfigError where they differ.

        A bundle holds launches of one workload; with other prompts they could not be compared.
        """
        known = {name: value for name, value in stored.items() if name in TuneOptions.__dataclass_fields__}
        for name in ("concurrency", "methods"):
            if isinstance(known.get(name), list):
                known[name] = tuple(known[name])
        restored = replace(self, **known)
        changed = [
            f.name
            for f in fields(self)
            if f.name in known and getattr(self, f.name) not in (f.default, getattr(restored, f.name))
        ]
        if changed:
            flag = "--" + changed[0].replace("_", "-")
            raise ConfigError(
                f"{flag} {getattr(self, changed[0])}: the run in {self.out} has {getattr(restored, changed[0])}, and "
                "launches of two settings cannot be compared.",
                hint="Resume without it, or choose another --out.",
            )
        return restored


@dataclass(frozen=True, slots=True)
class TunePlan:
    """What will be launched. ``commands`` are by arm name; ``launch_s`` is a rough forecast of one launch's length.

    ``done`` counts the launches that a resumed run has already.
    """

    options: TuneOptions
    arms: tuple[Arm, ...]
    num_prompts: int
    output_len: int
    launch_s: float
    expected_launches: int
    commands: dict[str, str]
    remarks: tuple[str, ...] = ()
    done: int = 0

    @property
    def expected_s(self) -> float:
        """Forecast of what is left to do, never above the budget."""
        return min(self.options.budget_s, self.needed_s)

    @property
    def needed_s(self) -> float:
        """The same, whatever the budget is."""
        return self.launch_s * max(1, self.expected_launches - self.done)

    @property
    def probes(self) -> tuple[Arm, ...]:
        """The arms that draft."""
        return tuple(arm for arm in self.arms if not arm.is_baseline)

    def summary(self) -> str:
        """One sentence, said before anything is launched."""
        names = ", ".join(arm.name for arm in self.probes)
        done = f"{self.done} launches are measured already. " if self.done else ""
        expected, budget = spoken_duration(self.expected_s), spoken_duration(self.options.budget_s)
        return (
            f"{done}This takes about {expected} (at most {budget}): "
            f"the baseline and {names}, each for {self.num_prompts} prompts of up to {self.output_len} tokens at "
            f"concurrency {' and '.join(map(str, self.options.concurrency))}, then the best one again in turn with the "
            "baseline until the verdict is safe."
            f"{self._short_of_time()}"
        )

    def _short_of_time(self) -> str:
        """Said where the budget may end before a verdict is safe; a forecast is rough, so a tenth more says nothing."""
        if self.needed_s <= 1.1 * self.options.budget_s:
            return ""
        minutes = math.ceil(self.needed_s / 60)
        return (
            f" The forecast without a limit is {spoken_duration(self.needed_s)}, so it may end without a verdict: "
            f"--budget {minutes}m, or --concurrency 1 or fewer --num-prompts."
        )

    def text(self) -> str:
        """The plan for people: the summary, then a line for each arm with its command."""
        rows = [f"  {arm.name:<16} {self.commands[arm.name]}" for arm in self.arms]
        return "\n".join([self.summary(), *rows, *self.remarks])

    def document(self) -> dict[str, Any]:
        """The plan for programs."""
        return {
            "schema": "surespec/tune_plan/1",
            "expected_s": round(self.expected_s, 1),
            "budget_s": self.options.budget_s,
            "expected_launches": self.expected_launches,
            "num_prompts": self.num_prompts,
            "output_len": self.output_len,
            "concurrency": list(self.options.concurrency),
            "policy": self.options.policy,
            "arms": [{**arm.model_dump(mode="json"), "command": self.commands[arm.name]} for arm in self.arms],
            "remarks": list(self.remarks),
        }


def plan_tune(options: TuneOptions) -> TunePlan:
    """The plan for these options; launches nothing.

    Raises UsageError, InputFileError for a prompts file, or ModelError when there is no such model.
    """
    options = with_recipe(options)
    options.check()
    known = known_drafters(options.model, options.engine, options.eagle3_head, options.draft_model)
    engine = engine_for(options)
    arms, refused = _arms(options, engine, known)
    workload = load_workload(options.prompts, options.num_prompts)  # finds a broken file before anything is launched
    num_prompts = options.num_prompts or min(DEFAULT_NUM_PROMPTS, len(workload.prompts))
    output_len = options.output_len or DEFAULT_OUTPUT_LEN
    pace = engine.pace()
    return TunePlan(
        options=options,
        arms=arms,
        num_prompts=num_prompts,
        output_len=output_len,
        launch_s=launch_seconds(pace, num_prompts, output_len, options.concurrency),
        expected_launches=len(arms) + 1 + MIN_LAUNCHES,  # one more k, and the second launch of two arms
        commands={arm.name: shell_text(engine.command(arm)) for arm in arms},
        remarks=tuple(text for text in (known.remark, *refused, *workload.warnings, _missing(engine)) if text),
    )


def with_recipe(options: TuneOptions) -> TuneOptions:
    """The options with model and engine as the recipe says. Raises InputFileError or UsageError for a recipe that
    cannot be tuned."""
    if options.recipe is None:
        return options
    recipe = read_recipe(Path(options.recipe), service=options.service)
    if options.managed:
        return replace(options, engine=recipe.engine, model=recipe.model)
    engine = recipe_engine(recipe)
    return replace(options, engine=engine.name, model=engine.target)


def _missing(engine: Engine) -> str:
    """What a recipe's command needs that is not here, as a remark: a plan may be made elsewhere."""
    problem = engine.missing() if isinstance(engine, RecipeEngine) else ""
    return f"Careful: {problem}, so nothing could be launched." if problem else ""


def engine_for(options: TuneOptions) -> Engine:
    """The engine these options ask for. Raises ConfigError, ModelError or EngineError when it cannot be had."""
    recipe = read_recipe(Path(options.recipe), service=options.service) if options.recipe else None
    if options.endpoint is not None:
        from surespec.engines.endpoint import managed_engine

        return managed_engine(options.engine, options.model, options.endpoint, recipe)
    if recipe is not None:
        return recipe_engine(recipe)
    settings = EngineSettings(
        python=Path(options.engine_python) if options.engine_python else None,
        program=Path(options.engine_program) if options.engine_program else None,
        max_model_len=options.max_model_len,
        max_num_seqs=max(options.concurrency),
        workers=options.workers,
        router_mode=options.router_mode,
        discovery=options.discovery,
        roll=options.roll,
    )
    return make_engine(options.engine, model=options.model, precision=options.precision, settings=settings)


def _arms(options: TuneOptions, engine: Engine, known: KnownDrafters) -> tuple[tuple[Arm, ...], list[str]]:
    """The baseline and the drafters this engine can run, and why others are left out."""
    named = replace(options, draft_model=engine.drafter(known.draft_model) if known.draft_model else None)
    probes = probe_arms(named, engine.drafter(known.eagle3_head) if known.eagle3_head else None)
    recipe = getattr(engine, "recipe", None)
    if recipe is not None and (own := own_arm(recipe)) is not None:  # what it does now, before anything else
        probes = (own, *(probe for probe in probes if probe.method != own.method))
    flags = recipe.flags if recipe is not None else {}
    refused = {probe.name: why for probe in probes if (why := _lossy(probe, flags) or engine.refusal(probe))}
    arms = tuple(probe for probe in probes if probe.name not in refused)
    if not arms:
        reasons = " ".join(refused.values())
        raise UsageError(
            f"There is no drafter to try. {reasons}".rstrip(),
            hint="" if refused else "Give --draft-model or --eagle3-head, or allow the method ngram.",
        )
    return (BASELINE, *arms), list(refused.values())


def _lossy(arm: Arm, flags: Mapping[str, Any]) -> str:
    """Why an arm is left out that is lossy by design; its recipe's flags count for it too."""
    said = lossy_settings({**flags, **(arm.speculative_config or {})})
    return f"{arm.name} is left out: {' '.join(said)}" if said else ""


def make_arm(method: str, k: int, model: str | None = None) -> Arm:
    """The arm of a drafter at k, with the speculative config that vLLM and the embedded engine read."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": k}
    if model is not None:
        config = {"method": method, "model": model, "num_speculative_tokens": k}
    if method == "ngram":
        config |= NGRAM_LOOKUP
    return Arm(name=f"{method}-k{k}", method=method, num_speculative_tokens=k, speculative_config=config)


def with_k(arm: Arm, k: int, *, alone: bool = False) -> Arm:
    """The same drafter at another k; ``alone``: drafting only while a single request runs.

    The table is vLLM's ``num_speculative_tokens_per_batch_size`` (0.24 and newer): rows of first and last batch size
    and k.
    """
    config = {**(arm.speculative_config or {}), "num_speculative_tokens": k}
    if alone:
        config["num_speculative_tokens_per_batch_size"] = [[1, 1, k], [2, LARGEST_BATCH, 0]]
    name = f"{arm.method}-k{k}{ALONE if alone else ''}"
    return Arm(name=name, method=arm.method, num_speculative_tokens=k, speculative_config=config)


def named_arm(probes: Sequence[Arm], name: str) -> Arm | None:
    """The arm that ``with_k`` gave this name to, from the probe of its drafter; None for another name."""
    match = re.fullmatch(rf"(.+)-k(\d+)({ALONE})?", name)
    probe = next((p for p in probes if match is not None and p.method == match[1]), None)
    if match is None or probe is None:
        return None
    return with_k(probe, int(match[2]), alone=match[3] is not None)


def probe_arms(options: TuneOptions, head: str | None) -> tuple[Arm, ...]:
    """One arm for each drafter that may win, EAGLE-3 first (rule C1), then a draft model (C2), then ngram."""
    allowed = options.methods or METHODS
    arms = []
    if head is not None and "eagle3" in allowed:
        arms.append(make_arm("eagle3", PROBE_K, head))
    if options.draft_model is not None and "draft_model" in allowed:
        arms.append(make_arm("draft_model", DRAFT_MODEL_PROBE_K, options.draft_model))
    if "ngram" in allowed:
        arms.append(make_arm("ngram", PROBE_K))
    return tuple(arms)


def launch_seconds(pace: Pace, num_prompts: int, output_len: int, concurrency: tuple[int, ...]) -> float:
    """Rough length of a launch: start, then warm-up and measured requests at each concurrency.

    A prompt costs about ten decoding steps; a step for c sequences costs 7 % more for each after the first (measured
    on the embedded engine); warm-up is max(2, c) requests.
    """
    steps_each = output_len + 10
    widths = (
        (num_prompts + max(2, c)) * steps_each * pace.step_ms / 1e3 * (1 + 0.07 * (c - 1)) / min(c, num_prompts)
        for c in concurrency
    )
    return pace.start_s + sum(widths)


def spoken_duration(seconds: float) -> str:
    """``40 seconds``, ``6 minutes``, ``1 h 20 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
