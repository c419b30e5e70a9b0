"""A running OpenAI-compatible server: which engine, which version, which model, and does it speculate already?"""

from __future__ import annotations

import urllib.error
from typing import Any

from yarl import URL

from surespec.core import Noun
from surespec.endpoint_url import KEY_VARIABLES, get_text, normalise_endpoint, shown
from surespec.errors import EndpointError
from surespec.json_text import loads_json
from surespec.rules import load_topic

MAX_BYTES = 8 * 2**20
TIMEOUT_S = 5.0
_SPEC_MARKS = ("spec_decode_num_draft", "spec_accept_length", "spec_decode_num_accepted")


class Endpoint(Noun):
    """What a server says of itself. ``speculating`` is None when its metrics cannot be read."""

    url: str
    engine: str = ""
    version: str = ""
    model: str = ""
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    speculating: bool | None = None
    has_metrics: bool = False
    notes: tuple[str, ...] = ()


def probe_endpoint(url: str, *, timeout_s: float = TIMEOUT_S) -> Endpoint:
    """Ask ``/v1/models``, ``/version`` and ``/metrics``.

    Raises UsageError for something that is no http URL, EndpointError when nothing or something else answers.
    """
    root = normalise_endpoint(url)
    base = shown(root)
    listing = _json(root, "v1/models", timeout_s, required=True)
    data = [m for m in listing.get("data", ()) if isinstance(m, dict)] if isinstance(listing.get("data"), list) else []
    if not data:
        raise EndpointError(f"{base}/v1/models lists no model.", hint="Is this an OpenAI-compatible server, and ready?")
    version = _json(root, "version", timeout_s).get("version")
    metrics = _text(root, "metrics", timeout_s) or ""
    engine = _engine(metrics, data[0])
    notes = [] if metrics else ["/metrics does not answer: acceptance cannot be read (SGLang wants --enable-metrics)."]
    if len(data) > 1:
        notes.append(f"{len(data)} models are served; the first is taken.")
    length = data[0].get("max_model_len")
    return Endpoint(
        url=base,
        engine=engine,
        version=str(version) if isinstance(version, str) else "",
        model=str(data[0].get("root") or data[0].get("id") or ""),
        models=tuple(str(m.get("id", "")) for m in data),
        max_model_len=length if isinstance(length, int) else None,
        speculating=any(mark in metrics for mark in _SPEC_MARKS) if metrics else None,
        has_metrics=bool(metrics),
        notes=tuple(notes),
    )


def _engine(metrics: str, model: dict[str, Any]) -> str:
    """By who owns the model where that is surespec (its metrics have vLLM's names), the metrics' prefix, the owner."""
    owner = str(model.get("owned_by", "")).lower()
    if owner == "surespec":
        return "local"
    for name, entry in load_topic("runtimes")["engine"].items():
        if name != "local" and entry["metrics"] in metrics:
            return str(name)
    return {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp"}.get(owner, "")


def _json(root: URL, path: str, timeout_s: float, *, required: bool = False) -> dict[str, Any]:
    text = _text(root, path, timeout_s, required=required)
    try:
        value = loads_json(text) if text else {}
    except (ValueError, RecursionError) as error:
        if required:
            raise EndpointError(
                f"{shown(root)}/{path} does not answer JSON.", hint="Is this an OpenAI-compatible server?"
            ) from error
        return {}
    return value if isinstance(value, dict) else {}


def _text(root: URL, path: str, timeout_s: float, *, required: bool = False) -> str | None:
    """The body of a GET, or None; with ``required`` an EndpointError instead of None."""
    hint = "Start the server, or check host and port."
    try:
        return get_text(root, path, timeout_s, MAX_BYTES)
    except urllib.error.HTTPError as error:
        problem = f"answers {error.code}"
        if error.code in (401, 403):
            hint = f"Set {' or '.join(KEY_VARIABLES)} to its key."
    except OSError as error:
        problem = f"does not answer ({getattr(error, 'reason', error)})"
    if required:
        raise EndpointError(f"{shown(root)}/{path} {problem}.", hint=hint)
    return None
