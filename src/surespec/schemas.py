"""The JSON schemas of everything surespec prints with ``--json`` (``surespec schema``). Pure.

A document's ``schema`` is ``surespec/NOUN/1``. Within a version fields are added and never renamed, removed or retyped,
so the schemas allow fields they do not know; a reader should ignore those too. What is a model elsewhere
(``BenchResult``, ``Judgement``, ``Plan``, ``Probe``, ``Diagnosis``) is described from that model; the small documents
are described here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from surespec.core import Arm, BenchResult, Judgement, Noun
from surespec.doctor import Diagnosis
from surespec.errors import UsageError
from surespec.plan_nouns import Model, Plan
from surespec.probe import Probe

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class FoundFault(Noun):
    """Something wrong in a recipe."""

    name: str
    line: int
    sentence: str
    fix: str


class ReadRecipe(Noun):
    """What a recipe says; an empty text or null where it does not say."""

    path: str
    kind: Literal["docker", "compose", "cmdline", "systemd", "kubernetes", "dynamo", "dynamo_script"]
    engine: str
    image: str
    engine_version: str
    model: str
    served_model_name: str
    host: str
    port: int | None
    service: str
    env: tuple[str, ...]
    flags: dict[str, Any]
    speculative_config: dict[str, Any] | None
    speculates: bool
    gpu_memory_utilization: float | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    kv_cache_dtype: str
    tensor_parallel_size: int | None
    dtype: str
    quantization: str
    diagnoses: tuple[FoundFault, ...]


class Fetched(Noun):
    """``surespec fetch``."""

    name: str
    path: str


class AppliedRecipe(Noun):
    """``surespec apply``: ``written`` is false with --dry-run, and where nothing had to change."""

    recipe: str
    kind: str
    engine: str
    changed: bool
    diff: str
    notes: tuple[str, ...]
    diagnoses: tuple[FoundFault, ...]
    original: str
    written: bool


class UndoneRecipe(Noun):
    """``surespec undo``."""

    recipe: str
    changed: bool


class ScheduleRow(Noun):
    """Batch sizes ``low`` to ``high``, both included, draft ``k`` tokens; ``ratio``: predicted speed beside none."""

    low: int
    high: int
    k: int
    ratio: float


class ScheduleTable(Noun):
    """``surespec schedule``: ``setting`` is the table in the engine's words, null where nothing drafts."""

    engine: str
    arm: str
    concurrencies: tuple[int, ...]
    idle_cost: float
    idle_cost_source: str
    rows: tuple[ScheduleRow, ...]
    setting: dict[str, Any] | None
    notes: tuple[str, ...]


class ArmToLaunch(Arm):
    """An arm with the command a person would type."""

    command: str


class TunePlanned(Noun):
    """``surespec tune --dry-run``."""

    expected_s: float = Field(description="seconds")
    budget_s: float = Field(description="seconds")
    expected_launches: int
    num_prompts: int
    output_len: int
    concurrency: tuple[int, ...]
    policy: str
    arms: tuple[ArmToLaunch, ...]
    remarks: tuple[str, ...]


class RuleEntry(Noun):
    """A rule of the table."""

    name: str
    rule: str
    why: str
    source: str
    contradiction: str


class RuleList(Noun):
    """``surespec explain`` without a name."""

    rules: tuple[RuleEntry, ...]


class Described(Noun):
    """``surespec schema`` without a name: every noun with the command that prints it."""

    nouns: dict[str, str]


def schema(noun: str) -> dict[str, Any]:
    """The JSON schema of ``surespec/NOUN/1``. Raises UsageError with the known nouns."""
    if noun not in _DOCUMENTS:
        raise UsageError(f"schema {noun}: there is no such document.", hint=f"Known: {', '.join(_DOCUMENTS)}.")
    _, model, change = _DOCUMENTS[noun]
    body = model.model_json_schema(mode="serialization")
    change(body)
    _open(body)
    fields = {"schema": {"const": f"surespec/{noun}/1"}, **body["properties"]}
    return {
        "$schema": DIALECT,
        "$id": f"surespec/{noun}/1",
        "title": f"surespec/{noun}/1",
        "description": body.get("description", ""),
        "type": "object",
        "properties": fields,
        "required": ["schema", *body.get("required", [])],
        **({"$defs": body["$defs"]} if "$defs" in body else {}),
    }


def nouns() -> dict[str, str]:
    """Every noun with the command that prints it."""
    return {noun: command for noun, (command, _, _) in _DOCUMENTS.items()}


def _open(node: Any) -> None:
    """Allow further fields everywhere: they may be added within a version. Titles only repeat the names."""
    if isinstance(node, dict):
        if node.get("additionalProperties") is False:
            del node["additionalProperties"]
        if isinstance(node.get("title"), str):
            del node["title"]
        for value in node.values():
            _open(value)
    elif isinstance(node, list):
        for value in node:
            _open(value)


def _drop(table: dict[str, Any], *names: str) -> None:
    for name in names:
        table["properties"].pop(name, None)
        if name in table.get("required", ()):
            table["required"].remove(name)


def _as_it_is(body: dict[str, Any]) -> None:
    """The document is the model."""


def _bench(body: dict[str, Any]) -> None:
    """``schema`` is ``schema_`` in the model."""
    _drop(body, "schema_")


def _judgement(body: dict[str, Any]) -> None:
    """Traces stay in the bundle."""
    _drop(body["$defs"]["Run"], "traces")


def _plan(body: dict[str, Any]) -> None:
    """``kv_bytes_per_token`` stands in the model."""
    _drop(body, "kv_bytes_per_token")
    model = body["$defs"][Model.__name__]
    model["properties"]["kv_bytes_per_token"] = {"type": "integer"}
    model["required"].append("kv_bytes_per_token")
    _with_recipe(body)


def _with_recipe(body: dict[str, Any]) -> None:
    """With ``--recipe`` the document holds what was read of it."""
    read = ReadRecipe.model_json_schema(mode="serialization")
    body.setdefault("$defs", {}).update(read.pop("$defs", {}))
    body["$defs"][ReadRecipe.__name__] = read
    body["properties"]["recipe"] = {"$ref": f"#/$defs/{ReadRecipe.__name__}"}


_Change = Callable[[dict[str, Any]], None]
_DOCUMENTS: dict[str, tuple[str, type[Noun], _Change]] = {
    "fetch": ("surespec fetch NAME --json", Fetched, _as_it_is),
    "probe": ("surespec probe --json", Probe, _with_recipe),
    "plan": ("surespec plan --json", Plan, _plan),
    "bench": ("surespec bench --json", BenchResult, _bench),
    "judge": ("surespec judge BASE CAND --json", Judgement, _judgement),
    "tune": ("surespec tune --json", Judgement, _judgement),
    "tune_plan": ("surespec tune --dry-run --json", TunePlanned, _as_it_is),
    "schedule": ("surespec schedule DIR --json", ScheduleTable, _as_it_is),
    "apply": ("surespec apply --json", AppliedRecipe, _as_it_is),
    "undo": ("surespec undo DIR --json", UndoneRecipe, _as_it_is),
    "rule": ("surespec explain RULE --json", RuleEntry, _as_it_is),
    "rules": ("surespec explain --json", RuleList, _as_it_is),
    "doctor": ("surespec doctor --json", Diagnosis, _as_it_is),
    "schemas": ("surespec schema --json", Described, _as_it_is),
}

__all__ = ["nouns", "schema"]
