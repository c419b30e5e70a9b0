"""A server that someone else manages: which arm it runs is read from its metrics page."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from surespec.core import BASELINE
from surespec.engines.endpoint import Seen, managed_engine, read_page
from surespec.errors import EngineError, UsageError
from surespec.tune_plan import TuneOptions, make_arm

PLAIN = 'vllm:num_requests_running{engine="0"} 0.0\nprocess_start_time_seconds 100.5\n'
EAGLE = make_arm("eagle3", 3, "head")


def speculating(k, born):
    lines = [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} 0.0' for i in range(k)]
    made = f"process_start_time_seconds {born}"
    return "\n".join(["vllm:spec_decode_num_drafts_total 0.0", *lines, made]) + "\n"


class Site:
    """A server whose metrics page a test changes; ``page`` None: it is down."""

    def __init__(self):
        self.page = None
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = json.dumps({"data": [{"id": "m"}]}) if "models" in self.path else site.page
                if site.page is None:
                    return self.send_error(503)
                self.send_response(200)
                self.end_headers()
                return self.wfile.write(body.encode())

            def log_message(self, *_):
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def site():
    site = Site()
    yield site
    site.server.shutdown()
    site.server.server_close()


def test_a_page_tells_speculation_k_and_life():
    assert read_page(PLAIN) == Seen(False, 0, "100.5")
    assert read_page(speculating(3, 200)) == Seen(True, 3, "200.0")
    assert read_page("") == Seen(False, 0, "")
    assert read_page(PLAIN).is_arm(BASELINE)
    assert not read_page(PLAIN).is_arm(EAGLE)
    assert read_page(speculating(3, 1)).is_arm(EAGLE)
    assert not read_page(speculating(5, 1)).is_arm(EAGLE)
    assert not read_page(speculating(3, 1)).is_arm(BASELINE)


def test_it_waits_through_every_wrong_state_for_the_arm(site, tmp_path):
    engine = managed_engine("vllm", "org/model", site.url + "/v1")
    steps = iter([PLAIN, speculating(5, 200), speculating(3, 300)])
    stages = []
    engine.sleep = lambda _s: setattr(site, "page", next(steps))
    server = engine.start(EAGLE, tmp_path / "log", stages.append)
    assert stages == [
        "waiting: nothing answers",
        "waiting: the server there runs without speculation",
        "waiting: the server there runs drafting 5 tokens",
    ]
    assert server.endpoint == site.url
    assert server.alive()
    server.stop()
    assert server.alive(), "it is not ours to stop"


def test_the_next_launch_wants_another_life_of_the_server(site, tmp_path):
    engine = managed_engine("vllm", "org/model", site.url)
    site.page = PLAIN
    engine.sleep = lambda _s: setattr(site, "page", PLAIN.replace("100.5", "101.5"))
    engine.start(BASELINE, tmp_path / "log")
    stages = []
    engine.start(BASELINE, tmp_path / "log", stages.append)
    assert stages == ["waiting: the server there was not restarted since the last launch"]


def test_it_says_what_to_start_and_gives_up_in_the_end(site, tmp_path):
    engine = managed_engine("vllm", "org/model", site.url)
    said = engine.instruction(EAGLE)
    assert "vllm serve org/model" in said
    assert "--speculative-config '{" in said
    assert site.url in said
    assert "without --speculative-config" in engine.instruction(BASELINE)
    engine.wait_s = 0.0
    engine.sleep = lambda _s: None
    with pytest.raises(EngineError, match="nothing answers") as caught:
        engine.start(BASELINE, tmp_path / "log")
    assert "--resume" in caught.value.hint


def test_ctrl_c_while_waiting_passes_through(site, tmp_path):
    engine = managed_engine("vllm", "org/model", site.url)

    def interrupt(_seconds):
        raise KeyboardInterrupt

    engine.sleep = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.start(BASELINE, tmp_path / "log")


@pytest.mark.parametrize("change", [{"managed": True}, {"endpoint": "http://127.0.0.1:1"}])
def test_managed_and_endpoint_belong_together(change):
    with pytest.raises(UsageError, match="belong together"):
        TuneOptions(engine="vllm", **change).check()
