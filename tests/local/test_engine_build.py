"""`build_engine`: from files and settings to an engine that answers, and what it refuses before loading weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_tools import Answer
from surespec.errors import ConfigError, ModelError
from surespec.local.engine import build_engine
from surespec.local.types import SamplingParams
from toy import make_eagle3_head, make_llama


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    target = make_llama(root / "target")
    return {
        "target": target,
        "small": make_llama(root / "small", layers=1, seed=5),
        "wide": make_llama(root / "wide", vocab=400),
        "head": make_eagle3_head(root / "my-eagle3", target),
        "misfit": make_eagle3_head(root / "misfit", target, hidden_size=48),
    }


def answer(models: dict[str, Path], config: dict[str, Any] | None, **settings: Any) -> tuple[list[int], str | None]:
    """The answer to one prompt, and the drafter's class."""
    engine, tokenizer = build_engine(models["target"], speculative_config=config, threads=1, **settings)
    try:
        prompt = tokenizer.encode("the rain in the rain")
        got = Answer(engine, prompt, SamplingParams(max_tokens=20)).wait()
        return got, None if engine.drafter is None else type(engine.drafter).__name__
    finally:
        engine.close()


def test_every_method_is_built_and_answers_the_same(models):
    plain, none = answer(models, None)
    assert none is None
    asked = [
        ({"method": "ngram", "prompt_lookup_max": 2}, "NgramDrafter"),
        ({"model": str(models["small"])}, "DraftModelDrafter"),
        ({"model": str(models["small"]), "draft_sample_method": "probabilistic"}, "DraftModelDrafter"),
        ({"model": str(models["head"])}, "Eagle3Drafter"),
    ]
    for config, drafter in asked:
        assert answer(models, {**config, "num_speculative_tokens": 3}) == (plain, drafter)


def test_the_drafters_context_may_be_shorter(models):
    """Past it the engine goes on without drafts."""
    plain, _ = answer(models, None)
    config = {"model": str(models["small"]), "num_speculative_tokens": 3, "max_model_len": 10}
    assert answer(models, config)[0] == plain


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_quantised_engine_answers(models, precision):
    config = {"model": str(models["head"]), "num_speculative_tokens": 2}
    got, _ = answer(models, config, precision=precision)
    assert 1 <= len(got) <= 20


@pytest.mark.parametrize(
    ("config", "settings", "error", "words"),
    [
        ({"model": "wide"}, {}, ModelError, "400 tokens and the target one of 320"),
        ({"model": "misfit", "method": "eagle3"}, {}, ModelError, "hidden size 48"),
        ({"model": "small", "method": "eagle3"}, {}, ModelError, "not an EAGLE-3 head"),
        ({"model": "nowhere"}, {}, ModelError, "nowhere"),
        ({"method": "ngram", "max_model_len": 600}, {}, ConfigError, "max_model_len is 600, but the target's is 512"),
        ({"method": "ngram", "max_model_len": 200}, {"max_model_len": 100}, ConfigError, "the target's is 100"),
        (None, {"max_model_len": 600}, ConfigError, "takes 2 to 512"),
        (None, {"max_num_seqs": 0}, ConfigError, "max_num_seqs is 0"),
        (None, {"kv_cache_tokens": 1}, ConfigError, "kv_cache_tokens is 1"),
    ],
)
def test_what_does_not_fit_is_refused(models, config, settings, error, words):
    if config is not None:
        config = {"num_speculative_tokens": 2, **config}
        if config.get("model") in models:
            config["model"] = str(models[config["model"]])
    with pytest.raises(error, match=words):
        build_engine(models["target"], speculative_config=config, threads=1, **settings)


def test_a_missing_model_is_named():
    with pytest.raises(ModelError, match="no-such-model"):
        build_engine("no-such-model")
