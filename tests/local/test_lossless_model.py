"""Losslessness and acceptance on the real small model (``make test-model``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine_tools import answer_all, draft_model, submit_together
from surespec.core import Gap, Launch
from surespec.fetch import resolve_model
from surespec.local import sampler
from surespec.local.drafters.base import Drafter
from surespec.local.drafters.eagle3 import Eagle3Drafter
from surespec.local.drafters.ngram import NgramDrafter
from surespec.local.eagle import Eagle3Head, read_aux_layers
from surespec.local.engine import EngineCounters, LocalEngine
from surespec.local.model import TargetModel
from surespec.local.speculative import SpeculativeConfig, parse_speculative_config
from surespec.local.tokenizer import Tokenizer, load_tokenizer
from surespec.local.types import SamplingParams
from surespec.local.weights import load_model_files
from surespec.lossless import compare_texts
from test_lossless import make_launch

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

THINGS = (
    "glaciers|owls|the printing press|tornadoes|pottery|batteries|lighthouses|vitamins|poetry|bridges|tea|maps|salt"
)
ASKS = (
    "Explain {} to a child.",
    "Repeat this text twice: People have used {} for a long time, and people will use {} for a long time.",
    "Write a Python list of five words about {}.",
    "Give me three facts about {} as a numbered list.",
)
MAX_LEN = 1024


class Small:
    """The small model, its tokenizer and 52 chat prompts."""

    def __init__(self, precision: str, threads: int | None = None) -> None:
        files = load_model_files(resolve_model("smollm2-135m"))
        self.tokenizer: Tokenizer = load_tokenizer(files)
        head = resolve_model("smollm2-135m-eagle3")
        self.target = TargetModel(files, precision, read_aux_layers(head, files.config.num_layers), threads)
        self.head = Eagle3Head(head, self.target)
        asked = [ask.format(*[thing] * ask.count("{}")) for thing in THINGS.split("|") for ask in ASKS]
        self.prompts = [
            self.tokenizer.encode(self.tokenizer.apply_chat_template([{"role": "user", "content": text}]))
            for text in asked
        ]

    def drafter(self, name: str, k: int) -> tuple[SpeculativeConfig, Drafter] | None:
        """A fresh drafter; "none" is the baseline."""
        vocab = self.target.config.vocab_size
        if name == "ngram":
            keys = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
            return parse_speculative_config(keys), NgramDrafter(2, 4, MAX_LEN)
        if name == "eagle3":
            config = parse_speculative_config({"method": "eagle3", "model": "head", "num_speculative_tokens": k})
            return config, Eagle3Drafter(self.head, vocab, max_num_seqs=16, max_len=MAX_LEN)
        return draft_model(self.target, k, 16, MAX_LEN) if name == "self" else None

    def run(
        self, name: str, params: SamplingParams, k: int = 3, seqs: int = 16
    ) -> tuple[list[list[int]], EngineCounters]:
        """All prompts through an engine of its own."""
        config, drafter = self.drafter(name, k) or (None, None)
        engine = LocalEngine(self.target, speculative=config, drafter=drafter, max_num_seqs=seqs, max_model_len=MAX_LEN)
        try:
            return answer_all(engine, self.prompts, [params] * len(self.prompts)), engine.counters()
        finally:
            engine.close()


GREEDY = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def small() -> Small:
    return Small("fp32")


@pytest.fixture(scope="module")
def plain(small: Small) -> list[list[int]]:
    answers, _ = small.run("none", GREEDY)
    assert len(answers) >= 50
    assert len({tuple(a) for a in answers}) > 45
    return answers


@pytest.mark.parametrize(("name", "k", "seqs"), [("none", 0, 3), ("ngram", 4, 8), ("eagle3", 3, 16), ("self", 2, 5)])
def test_fp32_greedy_is_the_same_token_for_token(small, plain, name, k, seqs):
    answers, counters = small.run(name, GREEDY, k, seqs)
    assert answers == plain
    if name == "self":
        assert counters.accepted == counters.drafted > 500


def test_the_trained_head_is_accepted_as_its_card_says(small):
    """A wrong shift of tokens, positions or states brings p_1 near zero; a trained head has at least 0.25."""
    _, counters = small.run("eagle3", replace(GREEDY, max_tokens=64), 3)
    p = [count / counters.drafts for count in counters.per_pos]
    assert p[0] > 0.25
    assert p[0] >= p[1] >= p[2] > 0.01


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_differences_stay_within_the_baselines_own(precision):
    """Kernels may round differently by batch width; speculation must not add to what width alone does."""
    small = Small(precision)
    small.prompts = small.prompts[::3]
    one, many = small.run("none", GREEDY, seqs=1)[0], small.run("none", GREEDY, seqs=8)[0]
    own = differing(one, many)
    for name in ("ngram", "eagle3"):
        spoken, _ = small.run(name, GREEDY, 3, seqs=8)
        found = differing(spoken, many)
        print(f"{precision} {name}: {found} of {len(many)} answers differ; {own} by batch width alone")
        assert min(found, differing(spoken, one)) <= own + SLACK


SLACK = 1  # of 18 answers: two counts of rare events are compared


def differing(a: list[list[int]], b: list[list[int]]) -> int:
    """How many answers are not the same."""
    return sum(x != y for x, y in zip(a, b, strict=True))


def as_launch(small: Small, index: int, arm: str, answers: list[list[int]], gaps: tuple[Gap, ...] = ()) -> Launch:
    texts = [small.tokenizer.decode(tokens) for tokens in answers]
    return make_launch(index, texts, arm).model_copy(update={"gaps": gaps})


def test_an_accept_rule_wrong_in_one_of_two_hundred_tokens_is_caught(small, monkeypatch):
    """The verdict's own comparison, on 52 prompts of 64 tokens: a mutated engine is at fault, batch mixes are not."""
    longer = replace(GREEDY, max_tokens=64)
    plain, mixed = small.run("none", longer)[0], small.run("none", longer, seqs=3)[0]
    baseline = [as_launch(small, 0, "baseline", plain), as_launch(small, 2, "baseline", mixed)]
    rng, right = np.random.default_rng(0), sampler.accept_greedy

    def mutated(drafts, target_argmax):
        accepted, following = right(drafts, target_argmax)
        if accepted < len(drafts) and rng.random() < 1 / 120:  # at a refusal, so about one token in 200
            return accepted + 1, int(target_argmax[accepted + 1])
        return accepted, following

    honest, _ = small.run("eagle3", longer, 3, seqs=5)
    assert compare_texts(baseline, [as_launch(small, 1, "eagle3-k3", honest)]).lossless is True
    monkeypatch.setattr(sampler, "accept_greedy", mutated)
    faulty, _ = small.run("eagle3", longer, 3)
    assert 0 < differing(faulty, plain) < 40
    report = compare_texts(baseline, [as_launch(small, 1, "eagle3-k3", faulty)])
    assert report.lossless is False, report.detail


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_another_number_of_threads_and_batch_mixes_are_not_taken_for_a_fault(precision):
    """Products are summed in another order; the candidate also runs in batches the baseline never had."""
    usual, single = Small(precision), Small(precision, threads=1)
    assert usual.target.threads != single.target.threads or usual.target.threads == 1
    longer = replace(GREEDY, max_tokens=48)
    baseline = [
        as_launch(usual, 2 * i, "baseline", usual.run("none", longer, seqs=s)[0]) for i, s in enumerate((16, 3))
    ]
    for index, (name, seqs) in enumerate((("ngram", 5), ("eagle3", 9))):
        spoken, _ = single.run(name, longer, 3, seqs=seqs)
        report = compare_texts(baseline, [as_launch(single, 2 * index + 1, name, spoken)])
        print(f"{precision} {name}: {report.detail}")
        assert report.lossless is not False, report.detail
        places = {d.prompt_id: d.position for d in report.divergences}
        gaps = tuple(gap_of(usual, prompt, place) for prompt, place in places.items())
        asked = [baseline[0].model_copy(update={"gaps": gaps}), baseline[1]]
        report = compare_texts(asked, [as_launch(single, 2 * index + 1, name, spoken)])
        assert report.lossless is True, report.detail


def gap_of(small: Small, prompt_id: str, position: int) -> Gap:
    """How clear the target's choice is at a character of its own greedy text of a prompt."""
    engine = LocalEngine(small.target, max_num_seqs=1, max_model_len=MAX_LEN)
    try:
        (answer,) = submit_together(
            engine, [small.prompts[int(prompt_id[1:])]], [SamplingParams(max_tokens=64, logprobs=2)]
        )
        tokens = answer.wait()
    finally:
        engine.close()
    chosen = [entry for output in answer.steps for entry in output.logprobs or ()]
    at = next(i for i in range(len(tokens)) if len(small.tokenizer.decode(tokens[: i + 1])) > position)
    best = sorted((logprob for _, logprob in chosen[at].top), reverse=True)
    return Gap(prompt_id=prompt_id, position=position, nats=best[0] - best[1])
