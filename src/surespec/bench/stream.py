"""What one streamed answer of an OpenAI-compatible server says, read event by event. No I/O and no clock: the caller
passes the time at which each event arrived (perf_counter seconds)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surespec.core import Acceptance
from surespec.json_text import loads_json

_SHOWN_CHARS = 300


class StreamFailure(Exception):
    """Why a request does not count; becomes ``Trace.error``."""


class RequestRefused(StreamFailure):
    """The server says that the request itself is wrong (HTTP 400 or 422)."""


@dataclass(slots=True)
class StreamState:
    """What has been read of one streamed answer."""

    sent_at: float
    chunk_times: list[float] = field(default_factory=list)
    last_at: float = 0.0
    text: list[str] = field(default_factory=list)
    finish_reason: str = ""
    done: bool = False
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    acceptance: Acceptance | None = None

    def take(self, data: str, name: str, now: float) -> None:
        """Account for one event that arrived at ``now``."""
        if data.strip() == "[DONE]":
            self.done = True
            return
        if not data.strip():
            return
        try:
            chunk = loads_json(data)
        except ValueError as err:
            raise StreamFailure(f"the stream has a data line that is not JSON: {data[:80]!r}") from err
        if not isinstance(chunk, dict):
            raise StreamFailure(f"the stream has a data line that is not a JSON object: {data[:80]!r}")
        if chunk.get("error") or name == "error" or chunk.get("object") == "error":
            raise StreamFailure(f"the server reported an error inside the stream: {error_text(chunk)}")
        self._count(chunk)
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            self.last_at = now
            content = _content_of(choice)
            if content is not None:
                self.chunk_times.append(now)
                self.text.append(content)
            self.finish_reason = str(choice.get("finish_reason") or self.finish_reason)

    def _count(self, chunk: Mapping[str, Any]) -> None:
        usage, timings, metrics = (_dict(chunk.get(key)) for key in ("usage", "timings", "metrics"))
        if isinstance(usage.get("completion_tokens"), int):
            self.output_tokens = usage["completion_tokens"]
            prompt = usage.get("prompt_tokens")
            self.prompt_tokens = prompt if isinstance(prompt, int) else self.prompt_tokens
        elif self.output_tokens is None and isinstance(timings.get("predicted_n"), int):
            self.output_tokens = timings["predicted_n"]
            self.prompt_tokens = timings["prompt_n"] if isinstance(timings.get("prompt_n"), int) else None
        if metrics.get("speculative_decoding"):
            self.acceptance = parse_acceptance(_dict(metrics["speculative_decoding"])) or self.acceptance

    def check(self) -> None:
        """Raise when the answer did not end, or cannot be counted."""
        if self.finish_reason in ("abort", "error"):
            raise StreamFailure(f"the server gave the request up (finish_reason {self.finish_reason})")
        if not self.done and not self.finish_reason:
            raise StreamFailure("the stream ended before the answer was complete")
        if self.output_tokens is None:
            raise StreamFailure("the server sent no usage with the stream, so its tokens cannot be counted")
        if self.output_tokens < 1:
            raise StreamFailure("the answer has no tokens")
        if not self.chunk_times and self.output_tokens > 1:
            raise StreamFailure(f"the server counted {self.output_tokens} output tokens but streamed no content")
        if not self.chunk_times:  # the end token alone: its chunk is the first token
            self.chunk_times.append(self.last_at)


def parse_acceptance(record: Mapping[str, Any]) -> Acceptance | None:
    """The per-request record of vLLM's ``--per-request-spec-decode-metrics`` as an Acceptance.

    Its histogram counts the steps with exactly j accepted tokens, as a list or as a map from j to the count; steps with
    at least i accepted tokens give p_i. None for a record that contradicts itself.
    """
    raw = record.get("acceptance_histogram")
    try:
        if isinstance(raw, Mapping):
            counts = {int(j): int(count) for j, count in raw.items()}
        elif isinstance(raw, list):
            counts = {j: int(count) for j, count in enumerate(raw)}
        else:
            return None
        drafted = int(record["num_draft_tokens"])
        width = max(int(record.get("num_spec_tokens") or 0), max(counts, default=0))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    accepted = sum(j * count for j, count in counts.items())
    if any(j < 0 or count < 0 for j, count in counts.items()) or accepted > drafted or width > 1024:
        return None
    if max(drafted, sum(counts.values())) >= 2**62:
        return None
    reached = tuple(sum(count for j, count in counts.items() if j >= i) for i in range(1, width + 1))
    return Acceptance(drafts=sum(counts.values()), drafted=drafted, accepted=accepted, accepted_per_position=reached)


def _content_of(choice: Mapping[str, Any]) -> str | None:
    """The text a chunk adds (``""`` for a tool-call delta without arguments); None when it holds no token.

    A role alone, an empty string and a null content are no token: several servers send such a chunk first.
    """
    if isinstance(choice.get("text"), str):
        return choice["text"] or None
    delta = _dict(choice.get("delta"))
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")  # some servers send both, equal
    text = "".join(part for part in (reasoning, delta.get("content")) if isinstance(part, str))
    calls = delta.get("tool_calls")
    if isinstance(calls, list) and calls:
        functions = [_dict(_dict(call).get("function")) for call in calls]
        return text + "".join(f"{f.get('name') or ''}{f.get('arguments') or ''}" for f in functions)
    return text or None


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def error_text(body: str | Mapping[str, Any]) -> str:
    """The message inside an error body of any of the usual shapes."""
    document: object = body
    if isinstance(body, str):
        try:
            document = loads_json(body)
        except ValueError:
            return body.strip()[:_SHOWN_CHARS] or "no message"
    error = document.get("error", document) if isinstance(document, Mapping) else document
    if isinstance(error, Mapping):
        return str(error.get("message") or error.get("detail") or json.dumps(dict(error)))
    return str(error)
