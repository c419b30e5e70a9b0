"""Metrics pages of the engines, and what two of them tell about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from surespec.bench.scrape import Snapshot, difference, parse_metrics, scrape, summed
from surespec.core import Acceptance

DATA = Path(__file__).parent.parent / "data" / "bench"
NOTHING = Snapshot()


def page(name: str) -> str:
    return (DATA / f"metrics-{name}.txt").read_text(encoding="utf-8")


def test_vllm_is_summed_over_engines_and_created_series_are_left_out() -> None:
    got = parse_metrics(page("vllm"))
    assert (got.drafts, got.drafted, got.accepted) == (150, 450, 180)
    assert got.positions == {0: 105, 1: 53, 2: 22} and got.found


def test_old_vllm_names_without_total() -> None:
    old = page("vllm").replace("_total", "")
    assert difference(NOTHING, parse_metrics(old)) == difference(NOTHING, parse_metrics(page("vllm")))


def test_llama_cpp() -> None:
    acceptance, notes = difference(NOTHING, parse_metrics(page("llamacpp")))
    assert acceptance == Acceptance(drafts=40, drafted=120, accepted=66, accepted_per_position=(33, 22, 11))
    assert notes == ()


def test_sglang_gauges_cannot_be_taken_apart() -> None:
    both = parse_metrics(page("sglang"))
    acceptance, notes = difference(both, both)
    assert acceptance is None and "running mean" in notes[0]


def test_tensorrt_llm_counts_no_drafts() -> None:
    acceptance, notes = difference(NOTHING, parse_metrics(page("trtllm")))
    assert acceptance is None and "not drafts" in notes[0]


def test_difference_is_the_share_between_two_snapshots() -> None:
    before = parse_metrics(page("llamacpp"))
    after = parse_metrics(
        page("llamacpp").replace(" 40\n", " 50\n").replace(" 120\n", " 150\n").replace(" 66\n", " 70\n")
    )
    acceptance, _ = difference(before, after)
    assert acceptance == Acceptance(drafts=10, drafted=30, accepted=4, accepted_per_position=(0, 0, 0))


def test_a_restarted_server_is_noticed() -> None:
    acceptance, notes = difference(parse_metrics(page("vllm")), parse_metrics(page("llamacpp")))
    assert acceptance is None and "restarted" in notes[0]


def test_no_speculation_is_silent() -> None:
    same = parse_metrics(page("vllm"))
    assert difference(same, same) == (None, ())
    assert difference(NOTHING, parse_metrics("vllm:num_requests_running 1\n")) == (None, ())
    assert difference(None, None) == (None, ())


def test_a_page_that_appears_only_afterwards_is_not_trusted() -> None:
    acceptance, notes = difference(None, parse_metrics(page("vllm")))
    assert acceptance is None and notes


def test_broken_lines_are_skipped() -> None:
    broken = 'vllm:spec_decode_num_drafts_total{engine="0" 7\nvllm:spec_decode_num_drafts_total{} abc\n\x00\n' + page(
        "vllm"
    )
    assert parse_metrics(broken) == parse_metrics(page("vllm"))
    nan = page("vllm") + 'vllm:spec_decode_num_drafts_total{engine="2"} NaN\n'
    assert parse_metrics(nan) == parse_metrics(page("vllm"))


@given(st.text(max_size=300))
def test_any_text_parses(text: str) -> None:
    parse_metrics(text)
    assert parse_metrics("vllm:spec_decode_" + text + "\n" + page("llamacpp")).found


@pytest.mark.parametrize("pages", [[], ["<html>hello</html>"]])
async def test_no_page_is_none(server: Any, pages: list[str]) -> None:
    server.metrics = pages
    async with aiohttp.ClientSession() as session:
        assert await scrape(session, URL(server.url)) is None


async def test_scrape_reads_the_page_and_survives_a_dead_server(server: Any, unused_tcp_port: int) -> None:
    server.metrics = [page("vllm")]
    async with aiohttp.ClientSession() as session:
        assert await scrape(session, URL(server.url)) == parse_metrics(page("vllm"))
        assert await scrape(session, URL(f"http://127.0.0.1:{unused_tcp_port}")) is None


def test_workers_are_summed_and_one_without_counters_adds_nothing() -> None:
    one = parse_metrics(page("vllm"))
    both = summed([one, Snapshot(), one])
    assert (both.drafts, both.drafted, both.accepted) == (2 * (one.drafts or 0), 2 * one.drafted, 2 * one.accepted)
    assert both.positions == {position: 2 * count for position, count in one.positions.items()}
    assert summed([one]) == one
    assert not summed([Snapshot(), Snapshot()]).found
