"""The tables: every entry has a source, names only what exists, and the rule page is up to date."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from surespec.dialects.versions import release
from surespec.errors import UsageError
from surespec.models import bundled
from surespec.rules import explain, load_topic, rules

ROOT = Path(__file__).parents[2]
REQUIREMENTS = [f"W{n}" for n in range(1, 7)] + ["B1"] + [f"C{n}" for n in range(1, 6)] + ["P1", "P2", "P3"]
REQUIREMENTS += [f"F{n}" for n in range(1, 5)] + [f"D{n}" for n in range(1, 5)]


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_every_requirement_is_a_rule_with_its_source(name: str) -> None:
    rule = explain(name)
    assert rule.rule and rule.why and rule.source.startswith(("S1", "S2"))


def test_rules_are_complete_sentences_with_sources() -> None:
    for rule in rules().values():
        assert rule.rule.endswith(".") and rule.why.endswith(".") and rule.source, rule.name


def test_contradictions_are_kept() -> None:
    assert all(explain(name).contradiction for name in ("W3", "C5", "D3"))


def test_explain_is_forgiving_in_case_and_helpful_otherwise() -> None:
    assert explain("c5").name == "C5"
    with pytest.raises(UsageError, match="no such rule") as caught:
        explain("C55")
    assert "C5" in caught.value.hint


def test_rules_named_in_the_sources_exist() -> None:
    """A rule's name in code or in a table is one of the table."""
    known = set(rules())
    text = "".join(p.read_text("utf-8") for p in (ROOT / "src/surespec/plan").glob("*.py"))
    text += (ROOT / "src/surespec/fitting.py").read_text("utf-8")
    named = set(re.findall(r'rule="([A-Z]\d)"', text)) | set(re.findall(r'"([A-Z]\d): ', text))
    assert named and named <= known


def test_heads_are_sourced_and_their_shape_is_their_targets() -> None:
    for head in load_topic("heads")["head"]:
        assert head["source"] and head["engines"], head["id"]
        target = bundled(head["target"])
        if target is None or not head["hidden_size"]:
            continue
        assert (head["hidden_size"], head["target_layers"]) == (target.hidden_size, target.num_layers), head["id"]
        assert head["vocab_size"] == target.vocab_size and head["draft_vocab_size"] <= target.vocab_size, head["id"]


def test_pairs_name_bundled_drafts_with_their_vocabulary() -> None:
    for pair in load_topic("pairs")["pair"]:
        draft = bundled(pair["draft"])
        assert draft is None or draft.vocab_size == pair["vocab_size"]
        assert pair["source"]


def test_devices_and_models_have_sources() -> None:
    for sku, device in load_topic("devices").items():
        assert device["visible_source"] and device["bandwidth_source"], sku
        assert 0.3 <= device["utilization"] <= 0.90
    for model in load_topic("models")["model"]:
        assert model["source"] and model["weight_source"] and model["license"]


def test_versions_in_the_field_table_are_versions() -> None:
    table = load_topic("vllm_fields")
    for name, entry in {**table["field"], **table["method"]}.items():
        assert release(entry["since"]), name
        assert "until" not in entry or release(entry["until"]) >= release(entry["since"]), name
    floors = [release(entry["since"]) for entry in table["eagle3_targets"]]
    assert floors == sorted(floors)


def test_bugs_have_a_fix_and_a_source() -> None:
    for bug in load_topic("known_bugs")["bug"]:
        assert bug["fix"] and bug["source"] and bug["effect"] in ("warn", "refuse"), bug["id"]


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_rule_table", ROOT / "tools" / "make_rule_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rule_page_is_up_to_date() -> None:
    """After a change of rules.toml: ``python tools/make_rule_table.py``."""
    assert (ROOT / "docs" / "rules.md").read_text("utf-8") == tool().page()
