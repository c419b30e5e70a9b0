"""Failures: every kind is recognised by real log lines, and no chain of remedies goes on for ever."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surespec.engines.failures import Failure, Remedy, classify, kinds, next_remedy, remaining
from surespec.rules import load_topic, rules

DATA = Path(__file__).parent.parent / "data" / "engines"
EXCERPTS = tomllib.loads((DATA / "excerpts.toml").read_text(encoding="utf-8"))["line"]
RECORDED = [
    ("vllm-unknown-field.log", "start", "unknown_field", "num_speculative_tokrns"),
    ("vllm-unknown-flag.log", "start", "unknown_field", "--spec-nonsense"),
    ("vllm-bad-json.log", "start", "configuration_rejected", "quotes"),
    ("vllm-lookup-bounds.log", "start", "configuration_rejected", "prompt_lookup_min=9 must be <= prompt_lookup_max=2"),
    ("vllm-draft-vocabulary.log", "start", "head_mismatch", "vocabulary"),
    ("vllm-head-size.log", "start", "head_mismatch", "[576, 1728]"),
    ("vllm-head-heads.log", "start", "head_mismatch", "num_heads (8)"),
    ("vllm-no-kv-space.log", "start", "no_kv_space", "One request of 8192 tokens needs 0.35 GiB"),
    ("vllm-port-in-use.log", "start", "port_in_use", "port"),
    ("vllm-synthetic.log", "first_request", "crash_first_request", "first request"),
    ("vllm-worker-killed.log", "load", "crash_under_load", "measured"),
    ("llamacpp-no-model.log", "start", "configuration_rejected", "/nonexistent.gguf"),
    ("llamacpp-no-draft.log", "start", "configuration_rejected", "/nonexistent.gguf"),
]


def read(name: str) -> list[str]:
    return (DATA / name).read_text(encoding="utf-8").splitlines()


def of_kind(kind: str, engine: str = "vllm") -> Failure:
    """A failure of a kind, by an excerpt or by how it ended."""
    for line in EXCERPTS:
        if line["kind"] == kind:
            return classify(line["engine"], "start", 1, None, line["text"].splitlines())
    endings = {"crash_first_request": "first_request", "crash_under_load": "load"}
    if kind == "hang":
        return classify(engine, "start", None, None, [])
    return classify(engine, endings.get(kind, "start"), 1, None, [])  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "moment", "kind", "words"), RECORDED)
def test_recorded_logs(name: str, moment: str, kind: str, words: str) -> None:
    failure = classify(name.split("-")[0], moment, 1, None, read(name))  # type: ignore[arg-type]
    assert failure.kind == kind
    assert words in failure.sentence
    assert failure.sentence.endswith(".") and failure.evidence


@pytest.mark.parametrize("line", EXCERPTS, ids=lambda line: f"{line['kind']}-{line['source'][:20]}")
def test_quoted_lines(line: dict[str, str]) -> None:
    failure = classify(line["engine"], "start", 1, None, ["INFO loading", *line["text"].splitlines(), "bye"])
    assert failure.kind == line["kind"]
    arguments = {key: value for remedy in failure.remedies for key, value in remedy.arguments.items()}
    if "field" in line:
        assert arguments["field"] == line["field"]
    if "to" in line:
        assert arguments["to"] == line["to"]


def test_every_kind_can_be_recognised() -> None:
    assert {of_kind(kind).kind for kind in kinds()} == set(kinds())


@pytest.mark.parametrize(
    ("moment", "exit_code", "signal", "kind"),
    [
        ("start", 1, None, "unknown"),
        ("start", None, None, "hang"),
        ("start", None, 9, "host_oom"),
        ("start", 137, None, "host_oom"),
        ("load", -9, 9, "host_oom"),
        ("load", None, 11, "crash_under_load"),
        ("first_request", 0, None, "crash_first_request"),
        ("load", None, None, "hang"),
        ("first_request", None, None, "unknown"),
    ],
)
def test_without_a_sign_the_ending_decides(moment, exit_code, signal, kind) -> None:
    failure = classify("vllm", moment, exit_code, signal, ["loading weights", "all is well"])
    assert failure.kind == kind
    assert failure.evidence == "all is well"


def test_the_cause_wins_over_its_consequences() -> None:
    lines = [
        "ValueError: No available memory for the cache blocks.",
        "RuntimeError: Engine core initialization failed.",
    ]
    assert classify("vllm", "start", 1, None, lines).kind == "no_kv_space"
    during = ["torch.OutOfMemoryError: CUDA out of memory.", "EngineDeadError: EngineCore encountered an issue."]
    assert classify("vllm", "load", 1, None, during).kind == "cuda_oom"


def test_a_server_may_outlive_its_engine() -> None:
    """vLLM's server runs on for seconds after its worker was killed; its log tells."""
    assert classify("vllm", "load", None, None, read("vllm-worker-killed.log")).kind == "crash_under_load"
    assert classify("vllm", "first_request", None, None, read("vllm-worker-killed.log")).kind == "crash_first_request"


@pytest.mark.parametrize("name", ["vllm-healthy.log", "llamacpp-healthy.log"])
def test_an_ordinary_log_shows_nothing(name: str) -> None:
    for moment, kind in (("start", "hang"), ("first_request", "unknown"), ("load", "hang")):
        assert classify(name.split("-")[0], moment, None, None, read(name)).kind == kind  # type: ignore[arg-type]


def test_other_engines_signs_are_not_looked_for() -> None:
    line = ["error: invalid argument: --spec-type"]
    assert classify("llamacpp", "start", 1, None, line).kind == "unknown_field"
    assert classify("trtllm", "start", 1, None, line).kind != "unknown_field"


def test_secrets_do_not_get_into_the_report() -> None:
    lines = ["error: argument --speculative-config: HF_TOKEN=hf_abcdefghijklmnopqrst cannot be converted"]
    failure = classify("vllm", "start", 2, None, lines)
    assert failure.kind == "configuration_rejected"
    assert "hf_abc" not in failure.model_dump_json()


def test_memory_kinds_have_different_first_remedies() -> None:
    """The seed's one rule (lower the utilization) is wrong when no KV space is left (M3)."""
    first = {kind: next_remedy(of_kind(kind), ()) for kind in ("admission", "no_kv_space", "cuda_oom")}
    assert {kind: remedy.name for kind, remedy in first.items() if remedy} == {
        "admission": "lower_utilization",
        "no_kv_space": "raise_utilization",
        "cuda_oom": "lower_utilization",
    }


def test_remedies_come_in_order_and_end() -> None:
    failure = of_kind("cuda_oom")
    tried: list[str] = []
    while (remedy := next_remedy(failure, tried)) is not None:
        tried.append(remedy.name)
    assert tried == ["lower_utilization"] * 2 + ["fewer_seqs"] * 2 + ["smaller_k"] * 2 + ["smaller_draft", "disable"]
    assert [remedy.name for remedy in remaining(failure, tried)] == ["memory_tuning"]


def test_what_would_take_a_remedy_back_is_not_offered() -> None:
    assert next_remedy(of_kind("no_kv_space"), ["lower_utilization"]).name == "shorter_context"  # type: ignore[union-attr]
    assert next_remedy(of_kind("admission"), ["raise_utilization"]).name == "disable"  # type: ignore[union-attr]


def test_a_person_is_asked_where_only_a_person_can_help() -> None:
    failure = of_kind("gated_model")
    assert next_remedy(failure, ()) is None
    assert [remedy.name for remedy in remaining(failure, ())] == ["set_token"]


@given(st.lists(st.sampled_from(kinds()), max_size=60))
def test_nothing_loops(sequence: list[str]) -> None:
    """Whatever fails after whatever, an arm is launched a bounded number of times."""
    tried: list[str] = []
    for kind in sequence:
        remedy = next_remedy(of_kind(kind), tried)
        if remedy is None:
            continue
        tried.append(remedy.name)
    limits = {name: entry.get("times", 1) for name, entry in load_topic("failures")["remedy"].items()}
    assert all(tried.count(name) <= limits[name] for name in tried)
    assert not {"lower_utilization", "raise_utilization"} <= set(tried)


def named(name: str, kind: str = "cuda_oom", **arguments: float) -> Remedy:
    remedy = next(remedy for remedy in of_kind(kind).remedies if remedy.name == name)
    return remedy.model_copy(update={"arguments": {**remedy.arguments, **arguments}})


@pytest.mark.parametrize(
    ("remedy", "before", "after"),
    [
        (named("lower_utilization"), 0.9, 0.85),
        (named("lower_utilization"), 0.31, 0.30),
        (named("lower_utilization"), 0.30, None),
        (named("lower_utilization", "admission", to=0.42), 0.9, 0.42),
        (named("lower_utilization", "admission", to=0.95), 0.9, 0.85),
        (named("raise_utilization", "no_kv_space"), 0.88, 0.90),
        (named("raise_utilization", "no_kv_space"), 0.92, None),
        (named("fewer_seqs"), 5, 2),
        (named("fewer_seqs"), 1, None),
        (named("shorter_context", "no_kv_space", to=896), 8192, 896),
        (named("shorter_context", "no_kv_space"), 600, 512),
        (named("longer_wait", "hang"), 300, 600),
        (named("disable"), 1, None),
    ],
)
def test_how_a_value_changes(remedy: Remedy, before: float, after: float | None) -> None:
    assert remedy.changed(before) == after


def test_the_table_names_only_what_exists() -> None:
    table = load_topic("failures")
    for sign in table["sign"]:
        assert sign["kind"] in table["kind"] and sign["source"]
        assert set(sign.get("remedies", ())) <= set(table["remedy"])
        wanted = set(re.findall(r"{(\w+)}", sign.get("what", "")))
        assert wanted <= set(re.compile(sign["regex"]).groupindex), sign["regex"]
    for kind in table["kind"].values():
        assert kind["what"].endswith(".") and kind["source"] and set(kind["remedies"]) <= set(table["remedy"])
    for remedy in table["remedy"].values():
        assert remedy["by"] in ("surespec", "person") and remedy["source"]
        assert all(name in table["remedy"] for name in remedy.get("excludes", ()))
        cited = set(re.findall(r"\b([A-Z]\d)\b", remedy["source"]))
        assert cited <= set(rules()), cited - set(rules())
