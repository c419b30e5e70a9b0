"""Request bodies: what is taken, what is ignored, what is refused and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from surespec.local.openai_api import (
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    Limits,
    RequestError,
    check_text,
    parse_json,
    parse_request,
)

HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> CompletionRequest:
    return parse_request({"prompt": "a", **fields}, CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return parse_request({"messages": HELLO, **fields}, ChatRequest)


def test_defaults_are_those_of_vllm() -> None:
    params = chat().sampling(7)
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens) == (1.0, 1.0, 0, None, 7)
    assert not params.ignore_eos and params.logprobs is None
    assert completion().token_limit == 16 and chat().token_limit is None


def test_sampling_fields_reach_the_engine() -> None:
    ask = chat(
        temperature=0, top_p=0.5, top_k=-1, seed=-3, ignore_eos=True, stop_token_ids=[5], logprobs=True, top_logprobs=2
    )
    params = ask.sampling(3)
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0, 0.5, 0, 2**64 - 3)
    assert params.ignore_eos and params.stop_token_ids == (5,) and params.logprobs == 2
    assert completion(logprobs=0).sampling(1).logprobs == 0
    assert chat(logprobs=True).sampling(1).logprobs == 0


def test_the_newer_token_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).token_limit == 9
    assert chat(max_tokens=5).token_limit == 5
    assert completion(max_tokens=3).token_limit == 3


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", ["ab"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_every_form_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_stop_is_a_string_or_a_list() -> None:
    assert completion(stop="x").stops == ("x",)
    assert completion(stop=["x", "yz"]).stops == ("x", "yz")
    assert completion(stop=None).stops == completion(stop=[]).stops == ()


def test_text_parts_become_one_text_and_other_fields_reach_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    made = [m.for_template() for m in chat(messages=messages).messages]
    assert made == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
    ]


def test_tools_are_shown_to_the_template_unless_refused() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(tools=tools).template_tools == tools
    assert chat(tools=tools, tool_choice="none").template_tools is None
    assert chat(tools=[]).template_tools is None


def test_harmless_fields_are_ignored() -> None:
    ask = chat(user="me", metadata={"a": 1}, store=True, parallel_tool_calls=False, response_format={"type": "text"})
    assert ask.sampling(1) == chat().sampling(1)


@pytest.mark.parametrize("field", sorted(NEUTRAL))
def test_what_would_change_the_text_is_refused_by_name(field: str) -> None:
    for neutral in (None, *NEUTRAL[field]):
        completion(**{field: neutral})
    with pytest.raises(RequestError, match=field) as refusal:
        completion(**{field: "something"})
    assert refusal.value.status == 400 and refusal.value.body["error"]["param"] == field


@pytest.mark.parametrize("field", ["echo", "min_p", "presence_penalty", "logit_bias"])
def test_values_of_another_type_are_not_taken_for_neutral(field: str) -> None:
    with pytest.raises(RequestError, match=field):
        completion(**{field: 0 if field == "echo" else False})


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temprature": 0}, "temprature", "Did you mean 'temperature'"),
        ({"zzz": 0}, "zzz", "Unknown field 'zzz'"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 1000}, "n", "less than or equal to 128"),
        ({"seed": 2**70}, "seed", "less than"),
        ({"stop": ""}, "stop", "non-empty string"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"prompt": 5}, "prompt", "must be a string"),
        ({"prompt": ["a", 3]}, "prompt", "must be a string"),
        ({"prompt": [-1]}, "prompt", "must be a string"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed when stream is true"),
        ({"stream": True, "stream_options": 5}, "stream_options", "must be an object, not a number"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ],
)
def test_completions_refused(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        completion(**fields)
    assert refusal.value.body["error"]["param"] == param
    assert refusal.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"messages": [5]}, "messages", "must be an object, not a number"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages\\[0\\].content is not valid"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", '"type": "text"'),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
        ({"tool_choice": "required"}, "tool_choice", "cannot force a tool call"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ],
)
def test_chats_refused(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        chat(**fields)
    assert refusal.value.body["error"]["param"] == param


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(RequestError, match="prompt is missing"):
        parse_request({}, CompletionRequest)


@pytest.mark.parametrize("body", [b"", b"{", b'{"a": NaN}', b"\xff\xfe\x00", b"[" * 100_000])
def test_bodies_that_are_no_json(body: bytes) -> None:
    with pytest.raises(RequestError, match="not JSON"):
        parse_json(body)


def test_a_body_that_is_no_object() -> None:
    with pytest.raises(RequestError, match="JSON object, not a list"):
        parse_json(b"[1]")


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        check_text(parse_json(b'{"prompt": "\\ud800"}')["prompt"], "prompt")


def test_limits() -> None:
    limits = Limits(max_model_len=10, kv_cache_tokens=100)
    assert limits.output_tokens(4, 6) == 6
    assert limits.output_tokens(4, None) == 6
    with pytest.raises(
        RequestError, match=r"4 prompt tokens and 7 output tokens do not fit into .*10 tokens"
    ) as refusal:
        limits.output_tokens(4, 7)
    assert refusal.value.body["error"]["code"] == "context_length_exceeded"
    with pytest.raises(RequestError, match="10 prompt tokens do not fit"):
        limits.output_tokens(10, None)
    with pytest.raises(RequestError, match="KV cache of 8 tokens"):
        Limits(max_model_len=10, kv_cache_tokens=8).output_tokens(4, 6)
    with pytest.raises(RequestError, match="empty"):
        limits.output_tokens(0, 1)
