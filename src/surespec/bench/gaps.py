"""How close was the choice where two texts part? The baseline is asked again, with logprobs.

Two kernels that round differently part at a near tie; a wrong accept rule parts anywhere. So the gap between the best
and the second token, at the place where a candidate's text left the baseline's, tells a numeric tie from a fault.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from surespec.bench.workload import Prompt
from surespec.core import Gap
from surespec.endpoint_url import api_key

TIMEOUT_S = 120.0
MOST = 8


def measure_gaps(
    endpoint: str, prompts: Sequence[Prompt], doubtful: Mapping[str, tuple[int, str]], *, output_len: int
) -> tuple[Gap, ...]:
    """The gap (nats) for each doubtful prompt: its id with the character where texts part and the baseline's own text.

    A prompt is left out where the server gives no logprobs, answers otherwise than before, or ended its text there.
    Never raises: without an answer there is no gap.
    """
    found = []
    for prompt in [prompt for prompt in prompts if prompt.id in doubtful][:MOST]:
        position, before = doubtful[prompt.id]
        try:
            answer = _ask(endpoint, prompt, output_len)
        except (OSError, ValueError, KeyError, IndexError, TypeError, urllib.error.URLError):
            continue
        nats = gap_at(answer, position, before)
        if nats is not None:
            found.append(Gap(prompt_id=prompt.id, position=position, nats=round(nats, 4)))
    return tuple(found)


def gap_at(content: Sequence[Mapping[str, Any]], position: int, before: str) -> float | None:
    """The gap at the token that covers character ``position``; ``content`` as in OpenAI's ``logprobs.content``.

    None where the text up to there is not ``before``'s, or the token's two best are not told.
    """
    text = b""
    for entry in content:
        start = len(text.decode("utf-8", "replace"))
        raw = entry.get("bytes")
        text += bytes(raw) if isinstance(raw, list) else str(entry.get("token", "")).encode()
        if len(text.decode("utf-8", "replace")) <= position:
            continue
        if text.decode("utf-8", "replace")[:position] != before[:position] or start > position:
            return None
        best = sorted((float(one["logprob"]) for one in entry.get("top_logprobs") or ()), reverse=True)
        return best[0] - best[1] if len(best) >= 2 else None
    return None


def _ask(endpoint: str, prompt: Prompt, output_len: int) -> list[dict[str, Any]]:
    headers = {"Content-Type": "application/json"}
    if key := api_key():
        headers["Authorization"] = f"Bearer {key}"
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/v1/models", headers=headers), timeout=10) as reply:
        model = json.load(reply)["data"][0]["id"]
    body = {
        "model": model, "messages": list(prompt.messages), "max_tokens": prompt.max_tokens or output_len,
        "temperature": 0, "seed": 0, "logprobs": True, "top_logprobs": 2, **prompt.extra,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{endpoint}/v1/chat/completions", data=json.dumps(body).encode(), headers=headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        content = json.load(reply)["choices"][0]["logprobs"]["content"]
    return content if isinstance(content, list) else []
