"""What clients receive: OpenAI's response objects, whole and as stream chunks, built from the deltas of each choice."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from surespec.local.streaming import Delta
from surespec.local.types import RequestStats, TokenLogprob

Json = dict[str, Any]


def speculative_metrics(stats: RequestStats, num_spec_tokens: int) -> Json:
    """A request's ``metrics.speculative_decoding``, with the field names of vLLM's
    ``--per-request-spec-decode-metrics summary`` (vLLM pull request 48915).

    ``acceptance_histogram[j]`` counts the verification steps that accepted exactly j draft tokens; it has
    ``num_spec_tokens`` + 1 buckets.
    """
    histogram = list(stats.acceptance_histogram)
    histogram += [0] * (num_spec_tokens + 1 - len(histogram))
    return {
        "mean_acceptance_length": 1.0 + stats.accepted / stats.drafts if stats.drafts else 1.0,
        "draft_acceptance_rate": stats.accepted / stats.drafted if stats.drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": stats.drafts,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": num_spec_tokens,
    }


@dataclass(slots=True)
class _Choice:
    """What has come for one choice so far."""

    text: str = ""
    tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offset: int = 0  # characters of all tokens before the next one, for completions' text_offset
    finish_reason: str | None = None
    stop_reason: str | None = None
    begun: bool = False


class Answer(ABC):
    """One request's answer as it grows. Subclasses know the shape of chat and of plain completions."""

    id_prefix = ""
    object_name = ""
    chunk_name = ""

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        choices: int,
        token_text: Callable[[int], str],
        *,
        logprobs: bool,
        num_spec_tokens: int | None,
    ) -> None:
        """``num_spec_tokens`` is the loaded k, or None without speculation (no ``metrics`` are sent then)."""
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._model = model
        self._created = int(time.time())
        self._prompt_tokens = prompt_tokens
        self._choices = [_Choice() for _ in range(choices)]
        self._token_text = token_text
        self._wants_logprobs = logprobs
        self._num_spec_tokens = num_spec_tokens
        self._stats: RequestStats | None = None

    def add(self, index: int, delta: Delta) -> list[Json]:
        """Take a delta in; return the choices of the stream chunks that carry it."""
        choice = self._choices[index]
        shown = self._logprobs_of(delta.logprobs or (), choice) if self._wants_logprobs else None
        choice.text += delta.text
        choice.tokens += len(delta.token_ids)
        choice.logprobs += delta.logprobs or ()
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        self._stats = delta.stats or self._stats
        chunks = self._chunk_choices(index, choice, delta, shown)
        choice.begun = True
        return chunks

    def chunk(self, choices: list[Json], **extra: Any) -> Json:
        """A stream chunk with these choices."""
        return self._envelope(self.chunk_name, choices, **extra)

    def usage_chunk(self) -> Json:
        """The last chunk of a stream that asked for its usage."""
        return self.chunk([], usage=self.usage(), **self._metrics())

    def body(self) -> Json:
        """The whole answer, for a request that is not streamed."""
        choices = []
        for index, choice in enumerate(self._choices):
            choice.offset = 0
            shown = self._logprobs_of(choice.logprobs, choice) if self._wants_logprobs else None
            choices.append(self._whole_choice(index, choice, shown))
        return self._envelope(self.object_name, choices, usage=self.usage(), **self._metrics())

    def usage(self) -> Json:
        """Token counts, as the engine counted them."""
        output = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self._prompt_tokens + output,
        }

    def _metrics(self) -> Json:
        """Per-request speculation metrics; as in vLLM only for a single choice."""
        if self._num_spec_tokens is None or self._stats is None or len(self._choices) != 1:
            return {}
        return {"metrics": {"speculative_decoding": speculative_metrics(self._stats, self._num_spec_tokens)}}

    def _envelope(self, name: str, choices: list[Json], **extra: Any) -> Json:
        head = {"id": self.id, "object": name, "created": self._created, "model": self._model}
        return {**head, "choices": choices, **extra}

    @abstractmethod
    def _logprobs_of(self, tokens: Sequence[TokenLogprob], choice: _Choice) -> Json:
        """The log-probabilities of the next tokens of a choice."""

    @abstractmethod
    def _chunk_choices(self, index: int, choice: _Choice, delta: Delta, logprobs: Json | None) -> list[Json]:
        """The stream form of a delta."""

    @abstractmethod
    def _whole_choice(self, index: int, choice: _Choice, logprobs: Json | None) -> Json:
        """The whole form of a choice."""


class ChatAnswer(Answer):
    """Answers of ``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _chunk_choices(self, index: int, choice: _Choice, delta: Delta, logprobs: Json | None) -> list[Json]:
        role = [
            {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
        content = {
            "index": index,
            "delta": {"content": delta.text},
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return [content] if choice.begun else [*role, content]

    def _whole_choice(self, index: int, choice: _Choice, logprobs: Json | None) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _logprobs_of(self, tokens: Sequence[TokenLogprob], choice: _Choice) -> Json:
        return {"content": [self._entry(t) for t in tokens], "refusal": None}

    def _entry(self, token: TokenLogprob) -> Json:
        top = [self._one(token_id, logprob) for token_id, logprob in token.top]
        return {**self._one(token.token_id, token.logprob), "top_logprobs": top}

    def _one(self, token_id: int, logprob: float) -> Json:
        text = self._token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8"))}


class CompletionAnswer(Answer):
    """Answers of ``/v1/completions``."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def _chunk_choices(self, index: int, choice: _Choice, delta: Delta, logprobs: Json | None) -> list[Json]:
        return [self._shape(index, delta.text, logprobs, delta.finish_reason, delta.stop_reason)]

    def _whole_choice(self, index: int, choice: _Choice, logprobs: Json | None) -> Json:
        return self._shape(index, choice.text, logprobs, choice.finish_reason, choice.stop_reason)

    @staticmethod
    def _shape(index: int, text: str, logprobs: Json | None, finish: str | None, stop: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}

    def _logprobs_of(self, tokens: Sequence[TokenLogprob], choice: _Choice) -> Json:
        shown: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token in tokens:
            text = self._token_text(token.token_id)
            shown["text_offset"].append(choice.offset)
            shown["token_logprobs"].append(_finite(token.logprob))
            shown["tokens"].append(text)
            # The sampled token is listed even outside the top ones. Several tokens may share a text (parts of a
            # character do); the sampled one and then the likeliest keeps it.
            top = {text: _finite(token.logprob)}
            for other, value in token.top:
                top.setdefault(self._token_text(other), _finite(value))
            shown["top_logprobs"].append(top)
            choice.offset += len(text)
        return shown


def _finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI's stand-in for "impossible" is -9999."""
    return max(float(logprob), -9999.0)
