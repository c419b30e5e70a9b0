"""A near tie is told from a fault by how clear the baseline's choice was."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from surespec.bench.gaps import gap_at, measure_gaps
from surespec.bench.workload import Prompt
from surespec.core import Gap
from surespec.lossless import compare_texts
from test_lossless import SAME, altered, make_launch


def content(*tokens, gap=0.2):
    return [
        {"token": t, "bytes": list(t.encode()), "top_logprobs": [{"logprob": -0.1}, {"logprob": -0.1 - gap}]}
        for t in tokens
    ]


@pytest.mark.parametrize(
    ("position", "before", "expected"),
    [
        (0, "abc def", 0.2),
        (4, "abc def", 0.2),
        (5, "abc xef", None),  # the text up to there is another one
        (7, "abc def", None),  # the text ended there
    ],
)
def test_the_gap_is_that_of_the_token_at_the_place(position, before, expected):
    found = gap_at(content("abc", " d", "ef"), position, before)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_bytes_count_where_a_character_is_cut():
    parts = [{"token": "?", "bytes": [b], "top_logprobs": [{"logprob": 0}, {"logprob": -3}]} for b in "aä".encode()]
    assert gap_at(parts, 1, "aä") == pytest.approx(3)


def test_one_alternative_tells_nothing():
    assert gap_at([{"token": "a", "top_logprobs": [{"logprob": 0}]}], 0, "a") is None


def baseline_with(nats, prompt_id="p00"):
    gap = Gap(prompt_id=prompt_id, position=10, nats=nats)
    return [make_launch(0, SAME), make_launch(2, SAME).model_copy(update={"gaps": (gap,)})]


def test_one_divergence_at_a_clear_choice_is_a_fault():
    report = compare_texts(baseline_with(4.2), [make_launch(1, altered(1))])
    assert report.lossless is False
    assert "4.2 nats" in report.detail and "no rounding" in report.detail


def test_divergences_at_near_ties_are_none():
    report = compare_texts(baseline_with(0.01), [make_launch(1, altered(1))])
    assert report.lossless is True
    assert "near tie" in report.detail


def test_a_gap_of_another_place_says_nothing():
    report = compare_texts(baseline_with(4.2, "p07"), [make_launch(1, altered(1))])
    assert report.lossless is None


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say({"data": [{"id": "m"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["messages"][0]["content"] == "broken":
            self.say({"choices": [{"logprobs": None}]})
        assert asked["temperature"] == 0 and asked["top_logprobs"] == 2
        self.say({"choices": [{"logprobs": {"content": content("abc", " d", "ef", gap=1.5)}}]})

    def say(self, document):
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_a_server_is_asked_and_what_it_does_not_tell_is_left_out():
    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    prompts = [Prompt(id=i, category="chat", messages=({"role": "user", "content": i},)) for i in ("good", "broken")]
    doubtful = {"good": (4, "abc def"), "broken": (4, "abc def")}
    try:
        found = measure_gaps(f"http://127.0.0.1:{server.server_port}", prompts, doubtful, output_len=8)
    finally:
        server.shutdown()
    assert found == (Gap(prompt_id="good", position=4, nats=1.5),)
    assert measure_gaps("http://127.0.0.1:9", prompts, doubtful, output_len=8) == ()
