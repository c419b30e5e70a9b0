"""Which head and draft are tried on which target, by which engine."""

import pytest

from surespec.tune_drafters import NO_HEAD, KnownDrafters, known_drafters

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def test_what_the_user_names_wins():
    assert known_drafters(LLAMA, "vllm", "my/head", "my/draft") == KnownDrafters("my/head", "my/draft")


def test_a_published_head_is_found_for_engines_that_load_it():
    found = known_drafters(LLAMA, "vllm", None, None)
    assert found.eagle3_head == "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    assert found.eagle3_head in found.remark
    assert found.draft_model is None, "C2: a draft is the fallback"
    assert known_drafters(LLAMA, "sglang", None, None).eagle3_head


@pytest.mark.parametrize("engine", ["dynamo", "dynamo-sglang", "dynamo-trtllm"])
def test_dynamo_is_offered_the_head_of_the_engine_inside(engine):
    inside = {"dynamo": "vllm", "dynamo-sglang": "sglang", "dynamo-trtllm": "trtllm"}[engine]
    assert known_drafters(LLAMA, engine, None, None) == known_drafters(LLAMA, inside, None, None)
    assert known_drafters(LLAMA, engine, None, None).eagle3_head


@pytest.mark.parametrize("engine", ["local", "llamacpp", "dynamo-local"])
def test_engines_that_cannot_load_it_by_name_are_told_how_to_get_it(engine):
    found = known_drafters(LLAMA, engine, None, "d")
    assert (found.eagle3_head, found.draft_model) == (None, "d")
    assert "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B" in found.remark and "--eagle3-head" in found.remark
    assert ("convert_hf_to_gguf.py" in found.remark) == (engine == "llamacpp")
    assert known_drafters("smollm2-360m", engine, None, None).remark == NO_HEAD


def test_without_a_head_a_draft_of_the_family_is_the_fallback(monkeypatch):
    monkeypatch.setattr("surespec.tune_drafters.heads_for", lambda _: ())
    found = known_drafters(LLAMA, "vllm", None, None)
    assert found.eagle3_head is None
    assert found.draft_model == "meta-llama/Llama-3.2-1B-Instruct"
    assert "C2" in found.remark
    assert known_drafters(LLAMA, "vllm", None, "mine").draft_model == "mine"


def test_a_model_nobody_knows_has_none():
    assert known_drafters("./no-such-folder", "vllm", None, None) == KnownDrafters(remark=NO_HEAD)
