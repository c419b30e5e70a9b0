"""Response objects: chunks, whole answers, log-probabilities and per-request speculation metrics."""

from __future__ import annotations

import json
import math
from typing import Any

from surespec.local.openai_wire import Answer, ChatAnswer, CompletionAnswer, speculative_metrics
from surespec.local.streaming import Delta
from surespec.local.types import RequestStats, TokenLogprob

STATS = RequestStats(10, 8, drafts=4, drafted=12, accepted=6, acceptance_histogram=[1, 1, 1, 1])


def answer(shape: type[Answer], choices: int = 1, logprobs: bool = False, k: int | None = None) -> Answer:
    return shape("m", 10, choices, lambda i: f"<{i}>", logprobs=logprobs, num_spec_tokens=k)


def test_chat_chunks_begin_with_the_role_and_end_with_the_reason() -> None:
    made = answer(ChatAnswer)
    first = made.add(0, Delta("he", (1, 2)))
    assert [c["delta"] for c in first] == [{"role": "assistant", "content": ""}, {"content": "he"}]
    [last] = made.add(0, Delta("llo", (3,), finish_reason="stop", stop_reason="!"))
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({"content": "llo"}, "stop", "!")
    assert made.chunk([last])["object"] == "chat.completion.chunk"
    assert made.usage_chunk()["usage"] == {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
    assert made.usage_chunk()["choices"] == []


def test_every_choice_has_its_own_text_and_all_are_counted() -> None:
    made = answer(CompletionAnswer, choices=2)
    made.add(1, Delta("b", (1,), finish_reason="length"))
    made.add(0, Delta("a", (1,)))
    made.add(0, Delta("A", (2,), finish_reason="stop"))
    body = made.body()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "aA", "stop"),
        (1, "b", "length"),
    ]
    assert body["usage"]["completion_tokens"] == 3


def test_speculation_metrics_are_there_only_for_one_choice_of_a_speculating_engine() -> None:
    def metrics(choices: int, k: int | None) -> Any:
        made = answer(ChatAnswer, choices, k=k)
        for index in range(choices):
            made.add(index, Delta("x", (1,), finish_reason="stop", stats=STATS))
        assert ("metrics" in made.body()) == ("metrics" in made.usage_chunk())
        return made.body().get("metrics")

    assert metrics(1, None) is None and metrics(2, 3) is None
    assert metrics(1, 3) == {
        "speculative_decoding": {
            "mean_acceptance_length": 2.5,
            "draft_acceptance_rate": 0.5,
            "acceptance_histogram": [1, 1, 1, 1],
            "num_spec_steps": 4,
            "num_accepted_draft_tokens": 6,
            "num_draft_tokens": 12,
            "num_spec_tokens": 3,
        }
    }


def test_a_request_without_drafts_has_an_acceptance_length_of_one() -> None:
    made = speculative_metrics(RequestStats(5, 1), 2)
    assert (made["mean_acceptance_length"], made["acceptance_histogram"]) == (1.0, [0, 0, 0])


def test_chat_logprobs() -> None:
    made = answer(ChatAnswer, logprobs=True)
    token = TokenLogprob(5, -0.5, ((5, -0.5), (6, -math.inf)))
    made.add(0, Delta("é", (5,), (token,), "stop"))
    [entry] = made.body()["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("<5>", -0.5, list(b"<5>"))
    assert [(t["token"], t["logprob"]) for t in entry["top_logprobs"]] == [("<5>", -0.5), ("<6>", -9999.0)]
    json.dumps(made.body(), allow_nan=False)


def test_completion_logprobs_offsets_run_on_over_chunks() -> None:
    made = answer(CompletionAnswer, logprobs=True)
    [first] = made.add(0, Delta("x", (5,), (TokenLogprob(5, -0.5, ((6, -0.1),)),)))
    [second] = made.add(0, Delta("y", (6,), (TokenLogprob(6, -0.7),), "length"))
    assert first["logprobs"]["top_logprobs"] == [{"<5>": -0.5, "<6>": -0.1}]
    assert (first["logprobs"]["text_offset"], second["logprobs"]["text_offset"]) == ([0], [3])
    assert made.body()["choices"][0]["logprobs"]["text_offset"] == [0, 3]
    assert made.body()["choices"][0]["logprobs"]["tokens"] == ["<5>", "<6>"]


def test_without_logprobs_there_are_none() -> None:
    made = answer(ChatAnswer)
    made.add(0, Delta("x", (5,), None, "stop"))
    assert made.body()["choices"][0]["logprobs"] is None
