"""One acceptance record from the pages of every engine: counted, worked out, or emptied by reading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from surespec.bench.scrape import Snapshot, difference, parse_metrics, scrape, with_server_info
from surespec.core import Acceptance

DATA = Path(__file__).parent.parent / "data" / "engines"


def text(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


def window(before: str, after: str) -> tuple[Acceptance | None, tuple[str, ...]]:
    return difference(parse_metrics(text(before)), parse_metrics(text(after)))


def test_vllm_recorded() -> None:
    acceptance, notes = window("vllm-metrics-before.txt", "vllm-metrics-after.txt")
    assert acceptance == Acceptance(drafts=13, drafted=37, accepted=32, accepted_per_position=(12, 12, 8))
    assert notes == ()


def test_llama_cpp_recorded() -> None:
    ngram, _ = window("llamacpp-metrics-ngram-before.txt", "llamacpp-metrics-ngram-after.txt")
    assert ngram == Acceptance(drafts=12, drafted=60, accepted=42, accepted_per_position=(10, 8, 8, 8, 8))
    own, _ = window("llamacpp-metrics-self-before.txt", "llamacpp-metrics-self-after.txt")
    assert own is not None and own.rate == 1.0 and own.length == 5.0, "a target drafting for itself is always right"
    assert window("llamacpp-metrics-none-before.txt", "llamacpp-metrics-none-after.txt") == (None, ())


def test_sglang_by_steps_tokens_and_requests() -> None:
    """500 tokens for 10 requests in 200 steps: 10 came from prompts, 200 from the steps, so 290 were accepted."""
    acceptance, notes = window("sglang-metrics-before.txt", "sglang-metrics-after.txt")
    assert acceptance == Acceptance(drafts=200, drafted=800, accepted=290)
    assert acceptance is not None and acceptance.length == pytest.approx(2.45)
    assert len(notes) == 1 and "worked out" in notes[0]


def test_sglang_counts_from_its_first_step() -> None:
    """Before the first step the counter of steps does not exist; what was sent until then is not the run's."""
    empty = parse_metrics(text("sglang-metrics-plain.txt").replace("650.0", "20.0").replace("13.0", "1.0"))
    acceptance, _ = difference(empty, parse_metrics(text("sglang-metrics-after.txt")))
    assert acceptance is not None and acceptance.accepted == (700 - 14 - 280) - (70 - 2)


def test_sglang_without_speculation_is_silent() -> None:
    plain = parse_metrics(text("sglang-metrics-plain.txt"))
    assert difference(plain, plain) == (None, ())


def without_steps(name: str) -> Snapshot:
    lines = [line for line in text(name).splitlines() if "verify_calls" not in line]
    return parse_metrics("\n".join(lines))


def info(mean: float) -> dict[str, Any]:
    return {"speculative_num_draft_tokens": 5, "internal_states": [{"avg_spec_accept_length": mean}]}


def test_sglang_cumulative_means_as_differences() -> None:
    """The mean over the server's life moves from 2.45 (196 tokens: 80 steps) to 2.0 (686 tokens: 343 steps)."""
    before, after = without_steps("sglang-metrics-before.txt"), without_steps("sglang-metrics-after.txt")
    assert not before.found and not after.found
    acceptance, _ = difference(with_server_info(before, info(2.45)), with_server_info(after, info(2.0)))
    assert acceptance == Acceptance(drafts=263, drafted=1052, accepted=227)


@pytest.mark.parametrize(
    "answer",
    [{}, {"internal_states": []}, info(0.0), info(float("nan")), {**info(2.0), "speculative_num_draft_tokens": None}],
)
def test_sglang_without_a_mean_stays_unknown(answer: dict[str, Any]) -> None:
    after = with_server_info(without_steps("sglang-metrics-after.txt"), answer)
    acceptance, notes = difference(after, after)
    assert acceptance is None and "running mean" in notes[0]


def test_tensorrt_llm_drained_iterations() -> None:
    """The second reading is the run: 5 drafts of 20 tokens, rank 1 repeats rank 0."""
    acceptance, notes = window("trtllm-iterations-before.json", "trtllm-iterations-after.json")
    assert acceptance == Acceptance(drafts=5, drafted=20, accepted=11)
    assert notes == ()
    assert difference(parse_metrics("[]"), parse_metrics(text("trtllm-iterations-after.json")))[0] == acceptance


def test_tensorrt_llm_says_when_it_threw_iterations_away() -> None:
    rows = json.loads(text("trtllm-iterations-after.json"))
    later = parse_metrics(json.dumps([{**row, "iter": row["iter"] + 500} for row in rows]))
    acceptance, notes = difference(parse_metrics(text("trtllm-iterations-before.json")), later)
    assert acceptance is not None and acceptance.drafts == 5
    assert "threw 500 away" in notes[0]


def test_tensorrt_llm_rows_as_text_and_damaged_rows() -> None:
    rows = json.loads(text("trtllm-iterations-after.json"))
    damaged = [*map(json.dumps, rows), None, 3, "{", {"specDecodingStats": {"numDraftTokens": -4}}, {"iter": "x"}]
    assert parse_metrics(json.dumps(damaged)).drafted == 20
    assert parse_metrics("[{").found is False


def test_tensorrt_llm_without_a_count_of_drafts() -> None:
    rows = json.loads(text("trtllm-iterations-after.json"))
    for row in rows:
        del row["specDecodingStats"]["numRequestsWithDraftTokens"]
    acceptance, notes = difference(parse_metrics("[]"), parse_metrics(json.dumps(rows)))
    assert acceptance is None and "not drafts" in notes[0]


def test_tensorrt_llm_by_position() -> None:
    acceptance, notes = window("trtllm-prometheus-before.txt", "trtllm-prometheus-after.txt")
    assert acceptance == Acceptance(drafts=40, drafted=118, accepted=51, accepted_per_position=(30, 15, 6))
    assert notes == ()


@pytest.fixture
async def pages() -> Any:
    """A server whose pages a test sets: path -> texts, one for each reading (the last stays)."""
    served: dict[str, list[str]] = {}

    async def answer(request: web.Request) -> web.Response:
        texts = served.get(request.path, [])
        if not texts:
            raise web.HTTPNotFound
        return web.Response(text=texts.pop(0) if len(texts) > 1 else texts[0])

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    yield served, URL(f"http://127.0.0.1:{port}")
    await runner.cleanup()


async def run_between(root: URL) -> tuple[Acceptance | None, tuple[str, ...]]:
    async with aiohttp.ClientSession() as session:
        before = await scrape(session, root)
        return difference(before, await scrape(session, root))


async def test_the_page_by_position_wins(pages: Any) -> None:
    served, root = pages
    served["/metrics"] = [text("trtllm-iterations-before.json"), text("trtllm-iterations-after.json")]
    assert (await run_between(root))[0] == Acceptance(drafts=5, drafted=20, accepted=11)
    served["/metrics"] = ["[]"]
    served["/prometheus/metrics"] = [text("trtllm-prometheus-before.txt"), text("trtllm-prometheus-after.txt")]
    acceptance, _ = await run_between(root)
    assert acceptance is not None and acceptance.per_position == (0.75, 0.375, 0.15)


async def test_the_server_info_is_asked_when_steps_are_missing(pages: Any) -> None:
    served, root = pages
    served["/metrics"] = [
        "\n".join(line for line in text(f"sglang-metrics-{when}.txt").splitlines() if "verify_calls" not in line)
        for when in ("before", "after")
    ]
    served["/get_server_info"] = [json.dumps(info(2.45)), json.dumps(info(2.0))]
    acceptance, _ = await run_between(root)
    assert acceptance is not None and acceptance.drafts == 263
