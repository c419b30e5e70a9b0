"""NVIDIA Dynamo for real, on this machine's CPU: frontend, router, its vLLM worker and ours (`make test-dynamo`).

Two workers on two cores are for function; nothing here depends on a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from real_tools import Stages, nothing_left
from surespec.bench.runner import BenchOptions, bench
from surespec.core import BASELINE
from surespec.engines import EngineSettings, make_engine
from surespec.engines.base import RunningServer
from surespec.engines.dynamo import DynamoEngine, _running_workers, listed_workers, system_ports
from surespec.engines.dynamo_fleet import RollingDynamo
from surespec.errors import EngineError
from surespec.fetch import fetch
from surespec.tune import tune
from surespec.tune_plan import TuneOptions, make_arm

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

MODEL = "smollm2-135m"
HEAD = "smollm2-135m-eagle3"
QUESTIONS = (
    "Name three birds.",
    "Repeat twice: a lighthouse shows ships where the rocks are.",
    "What is a battery?",
    "Write a list of five words about tea.",
    "Explain rain to a child.",
    "Count from one to twenty.",
)
MAX_TOKENS = 40


def settings(**more: Any) -> EngineSettings:
    return EngineSettings(max_model_len=1024, max_num_seqs=4, **more)


def dynamo(name: str, **more: Any) -> DynamoEngine:
    engine = make_engine(name, model=MODEL, settings=settings(**more))
    assert isinstance(engine, DynamoEngine)
    return engine


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Skip where there is no Dynamo; everything it needs is here otherwise."""
    try:
        dynamo("dynamo-local")
    except EngineError as error:
        pytest.skip(error.message)
    fetch(MODEL, "hf")


def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.endpoint}/v1", api_key="none", max_retries=0, timeout=120)


def asked(question: str) -> dict[str, Any]:
    return {
        "model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": MAX_TOKENS, "temperature": 0
    }  # fmt: skip


def plain(server: RunningServer) -> list[str]:
    """The greedy answers to all questions, not streamed."""
    found = [client(server).chat.completions.create(**asked(question)) for question in QUESTIONS]
    return [answer.choices[0].message.content or "" for answer in found]


def streamed(server: RunningServer, question: str) -> str:
    chunks = client(server).chat.completions.create(**asked(question), stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def drafted(server: Any) -> list[float]:
    """Draft tokens by each worker's own system port."""
    found = []
    for endpoint in server.metrics_endpoints:
        with urllib.request.urlopen(f"{endpoint}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        lines = [line for line in page.splitlines() if line.startswith("vllm:spec_decode_num_draft_tokens_total")]
        found.append(sum(float(line.rsplit(" ", 1)[1]) for line in lines))
    return found


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The embedded engine's answers without Dynamo and without speculation."""
    engine = make_engine("local", model=MODEL, settings=settings())
    server = engine.start(BASELINE, tmp_path_factory.mktemp("direct") / "server.log")
    try:
        return plain(server)
    finally:
        server.stop()


# --- the worker of vLLM -----------------------------------------------------------------------------------------------


def test_the_vllm_worker_speculates_and_says_what_vllm_alone_says(tmp_path: Path) -> None:
    engine = dynamo("dynamo")
    alone = make_engine("vllm", model=MODEL, settings=settings(python=engine.env.python))
    with nothing_left():
        server = alone.start(BASELINE, tmp_path / "vllm.log")
        try:
            expected = plain(server)
        finally:
            server.stop()
        server = engine.start(make_arm("eagle3", 3, engine.drafter(HEAD)), tmp_path / "dynamo.log")
        try:
            assert plain(server) == expected
            result = bench(
                BenchOptions(
                    server.endpoint, concurrency=(1,), prompts="chat", num_prompts=4, output_len=32,
                    metrics_endpoints=server.metrics_endpoints,
                )
            )  # fmt: skip
        finally:
            server.stop()
    (run,) = result.runs
    assert run.failed == 0
    assert run.acceptance is not None
    assert run.acceptance.drafts > 20
    assert len(run.acceptance.accepted_per_position) == 3
    assert 0 < run.acceptance.accepted < run.acceptance.drafted


# --- two workers of ours ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["kv", "round-robin"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two embedded workers with EAGLE-3 behind the frontend."""
    engine = dynamo("dynamo-local", workers=2, router_mode=request.param)
    with nothing_left():
        server = engine.start(make_arm("eagle3", 3, HEAD), tmp_path_factory.mktemp("pair") / "server.log")
        yield server
        server.stop()


def test_texts_are_those_of_direct_serving_and_both_workers_draft(pair: RunningServer, direct: list[str]) -> None:
    before = drafted(pair)
    assert plain(pair) == direct
    answers: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda q=question: answers.update({q: streamed(pair, q)})) for question in QUESTIONS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[question] for question in QUESTIONS] == direct
    more = [after - start for start, after in zip(before, drafted(pair), strict=True)]
    assert len(more) == 2
    assert min(more) > 0, "a worker got no request"


def test_acceptance_is_the_sum_of_both_workers(pair: RunningServer) -> None:
    before = drafted(pair)
    result = bench(
        BenchOptions(
            pair.endpoint, concurrency=(2,), prompts="copy", num_prompts=6, output_len=32, warmup=False,
            metrics_endpoints=pair.metrics_endpoints,
        )
    )  # fmt: skip
    acceptance = result.runs[0].acceptance
    assert acceptance is not None
    more = [after - start for start, after in zip(before, drafted(pair), strict=True)]
    # The check before the run drafts too, and is not the run's.
    assert 0 < acceptance.drafted <= sum(more)
    assert acceptance.drafted > max(more) / 2


def test_acceptance_reaches_a_client_that_asks_for_it(pair: RunningServer) -> None:
    body = {**asked(QUESTIONS[1]), "nvext": {"extra_fields": ["engine_data", "worker_id"]}}
    request = urllib.request.Request(
        f"{pair.endpoint}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.loads(answer.read())["nvext"]
    assert told["engine_data"]["num_speculative_tokens"] == 3
    assert told["worker_id"]


def test_a_client_that_goes_away_frees_its_slot(pair: RunningServer) -> None:
    chunks = client(pair).chat.completions.create(**{**asked("Tell a long story."), "max_tokens": 700}, stream=True)
    next(iter(chunks))
    chunks.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(running(endpoint) for endpoint in pair.metrics_endpoints):
        time.sleep(0.2)
    assert not any(running(endpoint) for endpoint in pair.metrics_endpoints)


def running(endpoint: str) -> float:
    with urllib.request.urlopen(f"{endpoint}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    return float(next(line for line in page.splitlines() if line.startswith("vllm:num_requests_running")).split()[-1])


def test_a_request_that_can_never_run_is_the_clients_fault(pair: RunningServer) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client(pair).chat.completions.create(**asked("long " * 2000))
    assert 400 <= refused.value.status_code < 500
    assert plain(pair)[0], "the server goes on"


def test_a_worker_killed_under_load_loses_no_request_and_one_can_be_added(tmp_path: Path, direct: list[str]) -> None:
    engine = dynamo("dynamo-local", workers=2)
    with nothing_left():
        server = engine.start(make_arm("eagle3", 3, HEAD), tmp_path / "server.log")
        added = None
        try:
            answers: list[tuple[str, str]] = []
            failures: list[Exception] = []

            def ask(question: str) -> None:
                try:
                    answers.append((question, streamed(server, question)))
                except openai.OpenAIError as error:
                    failures.append(error)

            threads = [threading.Thread(target=ask, args=(question,)) for question in QUESTIONS * 3]
            for thread in threads[:8]:
                thread.start()
            victim = worker_processes(server)[0]
            environment = victim.environ()
            time.sleep(0.5)
            victim.send_signal(signal.SIGKILL)
            for thread in threads[8:]:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failures, failures[0]
            expected = dict(zip(QUESTIONS, direct, strict=True))
            assert len(answers) == len(threads)
            assert [question for question, text in answers if text != expected[question]] == []
            arm = make_arm("eagle3", 3, HEAD)
            (system,) = system_ports(1)
            added = subprocess.Popen(
                engine.worker.argv(arm, typed=False),
                env={**os.environ, **{k: v for k, v in environment.items() if k.startswith(("DYN_", "SURESPEC_"))},
                     "DYN_SYSTEM_PORT": str(system)},
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            port = int(server.endpoint.rsplit(":", 1)[1])
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and (listed_workers(port) != 2 or not answers_at(system)):
                time.sleep(0.3)
            assert listed_workers(port) == 2
            assert plain(server) == direct
            with urllib.request.urlopen(f"http://127.0.0.1:{system}/metrics", timeout=30) as answer:
                page = answer.read().decode()
            tokens = next(line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total"))
            assert float(tokens.split()[-1]) > 0, "the added worker got nothing"
        finally:
            if added is not None:
                added.terminate()
                added.wait(60)
            server.stop()


def answers_at(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def worker_processes(server: RunningServer) -> list[psutil.Process]:
    return [p for p in psutil.Process(server.pid).children(recursive=True) if "--dynamo" in p.cmdline()]


# --- tune, and what goes wrong ----------------------------------------------------------------------------------------


def test_a_whole_tune_through_the_frontend_ends_in_a_verdict(tmp_path: Path) -> None:
    progress = Stages()
    with nothing_left():
        judged = tune(
            TuneOptions(
                engine="dynamo-local", model=MODEL, prompts="copy", concurrency=(1,), num_prompts=6, output_len=48,
                methods=("ngram",), max_launches=3, max_model_len=1024, budget_s=600, out=tmp_path / "run",
            ),
            progress,
        )  # fmt: skip
    assert judged.verdict in ("keep", "marginal", "inconclusive"), judged.why
    assert judged.ratios["c1"].throughput_tok_s.estimate > 1
    assert judged.lossless is not False, judged.lossless_detail
    launch = next(one for one in judged.launches if one.arm.startswith("ngram"))
    assert launch.runs[0].acceptance is not None
    assert launch.runs[0].acceptance.drafts > 10
    assert "dynamo.frontend" in judged.command
    assert not list(Path("/tmp").glob("surespec-dynamo-*/*kv*"))


def test_arms_roll_over_a_fleet_that_goes_on_serving(tmp_path: Path, direct: list[str]) -> None:
    engine = RollingDynamo(dynamo("dynamo-local", workers=2))
    failures: list[Exception] = []
    wrong: list[str] = []
    over = threading.Event()
    with nothing_left():
        try:
            first = engine.start(BASELINE, tmp_path / "baseline.log")
            first.stop()
            assert plain(first) == direct, "a parked arm serves on"

            def ask() -> None:
                while not over.is_set():
                    try:
                        if streamed(first, QUESTIONS[0]) != direct[0]:
                            wrong.append("another text")
                    except openai.OpenAIError as error:
                        failures.append(error)

            asking = threading.Thread(target=ask)
            asking.start()
            second: Any = engine.start(make_arm("eagle3", 3, HEAD), tmp_path / "eagle3.log")
            over.set()
            asking.join()
            assert not failures, failures[0]
            assert not wrong
            assert second.endpoint == first.endpoint
            assert plain(second) == direct
            assert min(drafted(second)) > 0, "both workers have the arm"
            assert second.alive()
        finally:
            over.set()
            engine.close()
        assert not second.fleet.processes


def test_a_worker_that_cannot_start_ends_the_launch_with_its_own_words(tmp_path: Path) -> None:
    engine = dynamo("dynamo-local", workers=2)
    with nothing_left(), pytest.raises(EngineError) as failed:
        engine.start(make_arm("eagle3", 3, str(tmp_path / "no-head")), tmp_path / "server.log")
    assert "no-head" in failed.value.message


def test_its_port_and_its_workers_are_known_by_its_process(pair: RunningServer) -> None:
    assert _running_workers(pair.pid, "--dynamo") == 2
    assert listed_workers(int(pair.endpoint.rsplit(":", 1)[1])) == 2
