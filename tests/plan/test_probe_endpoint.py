"""A running server is asked; what it does not answer is not known, and nothing is a traceback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from surespec.errors import EndpointError, UsageError
from surespec.probe import probe_endpoint

MODELS = json.dumps({"data": [{"id": "m", "root": "Qwen/Qwen3-8B", "max_model_len": 4096, "owned_by": "vllm"}]})


@contextmanager
def server(pages: dict[str, str]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, *_: object) -> None:
            return

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def test_vllm_that_speculates() -> None:
    pages = {
        "/v1/models": MODELS,
        "/version": '{"version": "0.31.0"}',
        "/metrics": "vllm:spec_decode_num_drafts_total 3\n",
    }
    with server(pages) as url:
        found = probe_endpoint(url + "/v1/")
    assert (found.engine, found.version, found.model, found.max_model_len) == ("vllm", "0.31.0", "Qwen/Qwen3-8B", 4096)
    assert found.speculating is True


def test_without_metrics_speculation_is_unknown_and_said() -> None:
    with server({"/v1/models": MODELS}) as url:
        found = probe_endpoint(url)
    assert (found.speculating, found.has_metrics, found.version) == (None, False, "")
    assert any("/metrics" in note for note in found.notes)


@pytest.mark.parametrize(
    ("metrics", "engine"),
    [("sglang:num_running_reqs 1", "sglang"), ("llamacpp:prompt_tokens_total 1", "llamacpp"), ("vllm:x 1", "vllm")],
)
def test_engine_by_metric_prefix(metrics: str, engine: str) -> None:
    with server({"/v1/models": MODELS, "/metrics": metrics}) as url:
        found = probe_endpoint(url)
    assert (found.engine, found.speculating) == (engine, False)


@pytest.mark.parametrize("body", ["<html>", "[]", '{"data": []}', '{"data": "x"}'])
def test_something_else_answers(body: str) -> None:
    with server({"/v1/models": body}) as url, pytest.raises(EndpointError):
        probe_endpoint(url)


def test_nothing_answers() -> None:
    with pytest.raises(EndpointError, match="does not answer"):
        probe_endpoint("http://127.0.0.1:1", timeout_s=1)


@pytest.mark.parametrize("url", ["ftp://localhost:8000", "file:///etc/passwd", "http://"])
def test_no_url(url: str) -> None:
    with pytest.raises(UsageError):
        probe_endpoint(url)
