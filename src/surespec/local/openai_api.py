"""What clients may send: request bodies of ``/v1/completions`` and ``/v1/chat/completions``, checked before any work.

Three sorts of fields are told apart (field names as in OpenAI's API reference and vLLM's extra parameters): those
this server carries out, those that cannot change the text and are ignored, and those that would change it but are not
implemented, which are accepted only at the value that changes nothing.
"""

from __future__ import annotations

import difflib
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surespec.errors import plain
from surespec.json_text import loads_json
from surespec.local.types import SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 16
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's and vLLM's default for /v1/completions

HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "cache_prompt", "id_slot"),
        *("request_id", "rid", "priority", "vllm_xargs", "kv_transfer_params", "data_parallel_rank"),
        *("include_reasoning", "separate_reasoning", "timings_per_token", "return_progress"),
        *("mm_processor_kwargs", "media_io_kwargs"),
    }
)
"""Fields that cannot change the generated text: taken and ignored."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True, False),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "logits_processors": ([],),
    "lora_request": (),
}
"""Fields that would change the text and are not implemented: only null and these values are accepted."""


class RequestError(Exception):
    """A request that is refused; becomes OpenAI's error envelope with this HTTP status."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = plain(message)
        self.status = status
        shown = None if param is None else plain(param)
        self.body = {"error": {"message": self.message, "type": kind, "param": shown, "code": code}}


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(_Wire):
    """``stream_options`` of a streamed request."""

    include_usage: bool = False


class TextPart(BaseModel):
    """One part of a message's content; only text is understood."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["text"]
    text: str


class Message(_Wire):
    """One chat message. Further fields (``name``, ``tool_calls``, ``tool_call_id``) reach the chat template as sent."""

    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content as one string, text parts joined by newlines."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return {"role": self.role, "content": content or "", **(self.model_extra or {})}


Probability = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=MAX_STOPS)]


class _Generation(_Wire):
    """Fields that both routes share. Defaults are vLLM's: temperature 1, all tokens."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[str, Field(min_length=1, max_length=1000)] | Stops | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, whichever way they were sent."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def token_limit(self) -> int | None:
        """The largest number of tokens asked for, or None."""
        return self.max_tokens

    @property
    @abstractmethod
    def top_alternatives(self) -> int | None:
        """How many alternatives a token's log-probabilities show; None: no log-probabilities."""

    def sampling(self, max_tokens: int) -> SamplingParams:
        """The engine's parameters, for at most ``max_tokens`` tokens."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            seed=None if self.seed is None else self.seed % 2**64,  # NumPy takes no negative seeds
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.top_alternatives,
        )


class CompletionRequest(_Generation):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str] | list[Annotated[int, Field(ge=0)]] | list[list[Annotated[int, Field(ge=0)]]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = True

    @property
    def top_alternatives(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class ResponseFormat(_Wire):
    """``response_format``: only free text is implemented."""

    type: str


class ChatRequest(_Generation):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_special_tokens: bool | None = False

    @property
    def top_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        """Refuse what is spelt correctly but not implemented. Raises RequestError."""
        if self.response_format is not None and self.response_format.type != "text":
            raise RequestError(
                f"response_format {self.response_format.type!r} is not supported: this server does not constrain the "
                "output; only 'text' is accepted.",
                param="response_format",
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice can only be 'auto' or 'none': this server cannot force a tool call.", param="tool_choice"
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the chat template is to show, or None."""
        return self.tools if self.tools and self.tool_choice != "none" else None


AnyRequest = TypeVar("AnyRequest", CompletionRequest, ChatRequest)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded engine can hold, in tokens of prompt plus output."""

    max_model_len: int
    kv_cache_tokens: int

    @property
    def tokens(self) -> int:
        """The longest prompt plus output that can ever run."""
        return min(self.max_model_len, self.kv_cache_tokens)

    def output_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        """How many tokens a prompt may be answered with. Raises RequestError when it does not fit."""
        if not prompt_tokens:
            raise RequestError("The prompt is empty: it holds no token.", param="prompt")
        total = prompt_tokens + (1 if asked is None else asked)
        if total > self.tokens:
            wanted = f"{prompt_tokens} prompt tokens" + ("" if asked is None else f" and {asked} output tokens")
            limit = (
                f"the model's context length of {self.max_model_len} tokens"
                if self.max_model_len <= self.kv_cache_tokens
                else f"the KV cache of {self.kv_cache_tokens} tokens"
            )
            raise RequestError(f"{wanted} do not fit into {limit}.", param="max_tokens", code="context_length_exceeded")
        return self.tokens - prompt_tokens if asked is None else asked


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body. Raises RequestError."""
    try:
        document = loads_json(body, keep_halves=True, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The request body is not JSON: {error}.") from None
    if not isinstance(document, dict):
        raise RequestError(f"The request body must be a JSON object, not {_json_type(document)}.")
    return document


def parse_request(document: dict[str, Any], kind: type[AnyRequest]) -> AnyRequest:
    """A checked request. Raises RequestError naming the field."""
    try:
        request = kind.model_validate(document)
    except ValidationError as error:
        raise _validation_error(error) from None
    for name, value in (request.model_extra or {}).items():
        _check_extra(name, value, kind)
    if isinstance(request, ChatRequest):
        request.check()
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")
    return request


def check_text(text: str, param: str) -> str:
    """Refuse text that is no valid Unicode (lone surrogates), which no tokenizer can encode. Raises RequestError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(
            f"{param} contains half of a surrogate pair, which is not valid text.", param=param
        ) from None
    return text


def _check_extra(name: str, value: Any, kind: type[_Generation]) -> None:
    if name in HARMLESS:
        return
    if name in NEUTRAL:
        if value is None or any(value == neutral and _same_sort(value, neutral) for neutral in NEUTRAL[name]):
            return
        raise RequestError(
            f"{name} is not supported by this server and would change the output; leave it out.", param=name
        )
    known = [*kind.model_fields, *NEUTRAL, *HARMLESS]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise RequestError(f"Unknown field {name!r} in the request.{hint}", param=name)


def _same_sort(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool)


UNION_RULES = {
    "prompt": "it must be a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": f"it must be a non-empty string or a list of at most {MAX_STOPS} of them, each of at most 1000 characters",
    "content": 'it must be a string or a list of parts {"type": "text", "text": ...}',
}
"""How to say what a field may hold where pydantic would report every branch of a union."""


def _validation_error(error: ValidationError) -> RequestError:
    """The first problem pydantic found, as one sentence with the field's path."""
    problem = error.errors(include_url=False, include_context=False)[0]
    path, reason = "", problem["msg"]
    for part in problem["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
        is_missing = problem["type"] == "missing" and part == problem["loc"][-1]
        if part in UNION_RULES and not is_missing:
            reason = UNION_RULES[str(part)]
            break
    else:
        if problem["type"] == "missing":
            return RequestError(f"{path} is missing.", param=path)
        if problem["type"] == "model_type":
            reason = f"it must be an object, not {_json_type(problem['input'])}"
    param = str(problem["loc"][0]) if problem["loc"] else None
    return RequestError(f"{path or 'The request'} is not valid: {reason}.", param=param)


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    for kind, name in (
        (dict, "an object"),
        (list, "a list"),
        (str, "a string"),
        (int, "a number"),
        (float, "a number"),
    ):
        if isinstance(value, kind):
            return name
    return "null"


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
