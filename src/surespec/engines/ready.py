"""The request that tells whether a server is ready: a short streamed chat, as a client would send it."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator

import psutil

from surespec.endpoint_url import api_key
from surespec.json_text import loads_json

REQUEST_TIMEOUT_S = 120.0
LISTEN_TIMEOUT_S = 10.0


def speaks_http(host: str, port: int) -> None:
    """Return when something answers, whatever it answers. Raises OSError or http.client.HTTPException."""
    connection = http.client.HTTPConnection(host, port, timeout=LISTEN_TIMEOUT_S)
    try:
        connection.request("GET", "/v1/models")
        connection.getresponse().read(1)
    finally:
        connection.close()


def listeners(port: int) -> set[int]:
    """The processes that listen on a TCP port of this machine, as far as it tells whose they are."""
    with contextlib.suppress(psutil.Error, OSError):
        found = psutil.net_connections(kind="tcp")
        return {c.pid for c in found if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.pid}
    return set()


def stream_once(host: str, port: int, key: str = "") -> str | None:
    """Send one short streamed chat; None when it gave a choice and no error, else the reason. ``key``: its API key, by
    default that of the environment.

    Raises OSError or http.client.HTTPException when the connection breaks.
    """
    connection = http.client.HTTPConnection(host, port, timeout=REQUEST_TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    if key := key or api_key():
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.request("GET", "/v1/models", headers=headers)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            return f"HTTP {response.status} from /v1/models"
        model = str(loads_json(body)["data"][0]["id"])
        messages = [{"role": "user", "content": "Say hello."}]
        request = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
        connection.request("POST", "/v1/chat/completions", body=json.dumps(request), headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            return f"HTTP {response.status}: {_reason(response.read(2000).decode('utf-8', 'replace'))}"
        return _read_stream(response)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return f"its answer is not that of an OpenAI-compatible server ({type(error).__name__})"
    finally:
        connection.close()


def _read_stream(response: http.client.HTTPResponse) -> str | None:
    """Read server-sent events to the end; None when at least one held a choice and none an error."""
    chosen = False
    for data in _events(response):
        if data == "[DONE]":
            break
        chunk = loads_json(data)
        if chunk.get("error"):
            return _reason(data)
        chosen = chosen or bool(chunk.get("choices"))
    return None if chosen else "the stream ended without a token"


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        text = line.decode("utf-8", "replace").strip()
        if text.startswith("data:"):
            yield text.removeprefix("data:").strip()


def _reason(text: str) -> str:
    """The message inside an error body, or the body."""
    try:
        error = loads_json(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:300]
