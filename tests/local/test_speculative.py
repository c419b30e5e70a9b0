"""What --speculative-config takes, infers and refuses."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surespec.errors import ConfigError
from surespec.local.speculative import SpeculativeConfig, parse_speculative_config

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def test_a_config_of_each_method():
    ngram = parse_speculative_config(json.dumps(NGRAM))
    assert (ngram.method, ngram.num_speculative_tokens) == ("ngram", 4)
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (5, 5)
    draft = parse_speculative_config({"model": "small", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1})
    assert (draft.method, draft.prompt_lookup_max) == ("draft_model", None)
    assert parse_speculative_config(ngram.document()) == ngram


@pytest.mark.parametrize(
    ("given_keys", "low", "high"),
    [
        ({"prompt_lookup_max": 3}, 3, 3),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, 2, 4),
    ],
)
def test_one_lookup_bound_mirrors_the_other(given_keys, low, high):
    config = parse_speculative_config({**NGRAM, **given_keys})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (low, high)


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ({"prompt_lookup_max": 4}, "ngram"),
        ({"model": "ngram"}, "ngram"),
        ({"model": "RedHatAI/Qwen3-8B-speculator.eagle3"}, "eagle3"),
        ({"model": "smollm2-135m-eagle3"}, "eagle3"),
        ({"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}, "eagle3"),
        ({"model": "Qwen/Qwen3-0.6B"}, "draft_model"),
    ],
)
def test_an_absent_method_is_inferred_as_vllm_does(data, method):
    assert parse_speculative_config({**data, "num_speculative_tokens": 2}).method == method


@pytest.mark.parametrize(
    "config", [{"architectures": ["LlamaForCausalLMEagle3"]}, {"speculators_model_type": "eagle3"}]
)
def test_a_head_with_an_odd_name_is_known_by_its_config(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = parse_speculative_config({"model": str(tmp_path), "num_speculative_tokens": 2})
    assert found.method == "eagle3"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({**NGRAM, "num_speculative_tokrns": 3}, ["num_speculative_tokrns", "Did you mean num_speculative_tokens"]),
        ({**NGRAM, "zzz": 3}, ["unknown key 'zzz'", "Known keys: method, model"]),
        ({**NGRAM, "parallel_drafting": True}, ["parallel_drafting is a key of vLLM", "embedded engine"]),
        ({"method": "ngram"}, ["num_speculative_tokens is missing"]),
        ({**NGRAM, "num_speculative_tokens": 0}, ["num_speculative_tokens is 0", "without speculation"]),
        ({**NGRAM, "num_speculative_tokens": 99}, ["is 99", "1 to 32"]),
        ({**NGRAM, "num_speculative_tokens": -1}, ["is -1"]),
        ({**NGRAM, "num_speculative_tokens": "4"}, ["num_speculative_tokens is '4'"]),
        ({**NGRAM, "num_speculative_tokens": True}, ["num_speculative_tokens is True"]),
        ({**NGRAM, "model": "x"}, ["ngram", "no model", "'x'"]),
        ({**NGRAM, "prompt_lookup_min": 5, "prompt_lookup_max": 2}, ["prompt_lookup_min is 5", "max is 2"]),
        ({**NGRAM, "prompt_lookup_min": 0}, ["prompt_lookup_min is 0"]),
        ({**NGRAM, "draft_sample_method": "probabilistic"}, ["probabilistic", "ngram has none"]),
        ({**NGRAM, "rejection_sample_method": "synthetic"}, ["rejection_sample_method is 'synthetic'"]),
        ({**NGRAM, "draft_tensor_parallel_size": 2}, ["draft_tensor_parallel_size is 2"]),
        ({**NGRAM, "max_model_len": 0}, ["max_model_len is 0"]),
        ({"method": "eagle3", "num_speculative_tokens": 2}, ["eagle3 needs model"]),
        ({"num_speculative_tokens": 2}, ["draft_model needs model"]),
        ({"model": "m", "num_speculative_tokens": 2, "prompt_lookup_max": 2}, ["belong to method ngram"]),
        ({"method": "suffix", "num_speculative_tokens": 2}, ["suffix is known to vLLM", "ngram, draft_model, eagle3"]),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 2}, ["deepseek_mtp is known to vLLM"]),
        ({"model": "yuhuili/EAGLE-llama2", "num_speculative_tokens": 2}, ["eagle is known to vLLM"]),
        ({"method": "eagle-3", "num_speculative_tokens": 2}, ["unknown method 'eagle-3'", "Did you mean eagle3"]),
        ({"method": 3, "num_speculative_tokens": 2}, ["unknown method 3"]),
    ],
)
def test_what_is_wrong_is_said(data, words):
    with pytest.raises(ConfigError) as caught:
        parse_speculative_config(data)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("""'{"method": "ngram"}'""", ["literal ' quotes"]),
        ('"{\\"method\\": \\"ngram\\"}"', ['literal " quotes']),
        ('{{"method": "ngram"}}', ["braces are doubled"]),
        ('{\\"method\\": \\"ngram\\"}', ["backslashes"]),
        ("{'method': 'ngram'}", ["double quotes around names"]),
        ('{"method": "ngram",}', ["character 20"]),
        ("", ["character 1"]),
        ("[1]", ["must be a JSON object"]),
    ],
)
def test_json_broken_on_its_way_is_recognised(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_speculative_config(text)
    for word in words:
        assert word in str(caught.value)
    assert "single quotes" in caught.value.hint


def with_table(table):
    return parse_speculative_config({**NGRAM, "num_speculative_tokens_per_batch_size": table})


def test_a_table_is_read_as_vllm_reads_it():
    config = with_table([[1, 2, 9], [3, 4, 2], [8, 8, 0]])
    assert [config.k_for_batch(n) for n in (1, 2, 3, 4, 5, 7, 8, 9, 100)] == [4, 4, 2, 2, 2, 2, 0, 0, 0]
    assert config.document()["num_speculative_tokens_per_batch_size"] == [[1, 2, 9], [3, 4, 2], [8, 8, 0]]
    assert parse_speculative_config(NGRAM).k_for_batch(50) == 4


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([], "is empty"),
        ([[2, 4, 3]], "must start at batch size 1"),
        ([[1, 4, 3], [4, 8, 2]], "overlaps the row that ends at 4"),
        ([[1, 4, -1]], "k >= 0"),
        ([[1, 4, 3], [8, 6, 2]], "lo <= hi"),
        ([[1, 4]], "num_speculative_tokens_per_batch_size"),
        ([[1, 4, "3"]], "num_speculative_tokens_per_batch_size"),
        ({"1": 3}, "num_speculative_tokens_per_batch_size"),
    ],
)
def test_a_table_that_breaks_the_rules_is_refused(table, words):
    with pytest.raises(ConfigError, match=words):
        with_table(table)


@given(st.text(max_size=60) | st.builds(json.dumps, st.recursive(st.integers() | st.text(), st.lists)))
def test_no_text_gives_anything_but_a_config_error(text):
    with pytest.raises(ConfigError):
        parse_speculative_config(text)


@given(
    st.dictionaries(
        st.sampled_from(list(SpeculativeConfig.model_fields)),
        st.none() | st.integers(-2, 40) | st.text(max_size=5) | st.lists(st.integers(), max_size=3),
    )
)
def test_no_mapping_gives_anything_but_a_config_or_a_config_error(data):
    try:
        assert 1 <= parse_speculative_config(data).num_speculative_tokens <= 32
    except ConfigError as error:
        assert error.message
