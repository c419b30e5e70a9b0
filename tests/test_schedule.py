"""Tables batch size -> k: without gaps, never worse than their best entry, and in every engine's words."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surespec.errors import BundleError, UsageError
from surespec.local.speculative import parse_speculative_config
from surespec.schedule import (
    CERTAIN,
    LARGEST_BATCH,
    Point,
    as_sglang,
    as_trtllm,
    as_vllm,
    best_k,
    most_k,
    table,
)
from surespec.scheduling import schedule_of
from surespec.tune import tune
from surespec.tune_plan import TuneOptions
from test_tune import Deployment

ratios = st.fixed_dictionaries({k: st.floats(0.3, 3.0) for k in (1, 2, 3, 5)})
points = st.lists(
    st.builds(Point, st.integers(1, 32), ratios), min_size=1, max_size=4, unique_by=lambda p: p.concurrency
)

FALLS = (
    Point(1, {1: 1.3, 3: 1.6, 5: 1.7}),
    Point(8, {1: 1.1, 3: 1.0, 5: 0.8}),
    Point(16, {1: 0.9, 3: 0.7, 5: 0.5}),
)


@given(points, st.floats(0, 0.2))
def test_rows_cover_every_batch_size_once(given_points, idle):
    rows = table(given_points, idle_cost=idle)
    assert (rows[0].low, rows[-1].high) == (1, LARGEST_BATCH)
    assert all(a.high + 1 == b.low and a.k != b.k for a, b in pairwise(rows))


@given(points, st.floats(0, 0.2))
def test_a_table_is_never_predicted_slower_than_drafting_nothing(given_points, idle):
    for row in table(given_points, idle_cost=idle):
        assert row.ratio >= (1 - idle) / 1.01


@given(points)
def test_at_a_measured_size_the_best_k_is_within_a_tie_of_the_best_or_nothing_is_certain_to_gain(given_points):
    for p in given_points:
        k, ratio = best_k(sorted(given_points, key=lambda q: q.concurrency), p.concurrency)
        best = max(p.ratios.values())
        assert ratio >= best / 1.011 if k else best < 1 + CERTAIN


@given(points)
def test_the_order_of_points_does_not_matter(given_points):
    assert table(given_points) == table(given_points[::-1])


@given(points, st.floats(0, 0.2))
def test_k_never_rises_with_the_batch_size(given_points, idle):
    ks = [row.k for row in table(given_points, idle_cost=idle)]
    assert ks == sorted(ks, reverse=True)


def test_a_gain_at_a_larger_size_only_is_noise():
    assert [row.k for row in table((Point(1, {2: 1.3}), Point(8, {2: 0.9}), Point(16, {2: 1.2})))] == [2, 0]


def test_known_table():
    rows = table(FALLS)
    assert rows[0].k == 5 and rows[-1].k == 0
    assert best_k(FALLS, 1) == (5, 1.7)
    assert best_k(FALLS, 16)[0] == 0
    assert [row.k for row in rows] == sorted((row.k for row in rows), reverse=True)


def test_drafting_nothing_is_not_free():
    """A loss smaller than what k = 0 costs is taken."""
    slightly = (Point(1, {1: 1.4}), Point(8, {1: 0.99}))
    assert best_k(slightly, 8)[0] == 0
    assert best_k(slightly, 8, idle_cost=0.066)[0] == 1


def test_every_engines_words():
    rows = table(FALLS)
    written = as_vllm(rows)
    config = parse_speculative_config(
        {"method": "ngram", "num_speculative_tokens": most_k(rows), "num_speculative_tokens_per_batch_size": written}
    )
    assert config is not None
    assert [config.k_for_batch(b) for b in (1, 8, 16)] == [best_k(FALLS, b)[0] for b in (1, 8, 16)]
    schedule = as_trtllm(rows)
    assert schedule[min(schedule)] == most_k(rows) and 0 not in schedule.values()
    assert as_sglang(rows)["1"] == {"candidate_steps": [5]}


def test_nothing_to_write():
    with pytest.raises(UsageError, match="No batch size gains"):
        as_trtllm(table([Point(1, {1: 0.5})]))
    with pytest.raises(ValueError, match="at least one"):
        table([])


@pytest.fixture
def measured(tmp_path):
    """A finished run of a simulated deployment: drafting pays alone and costs under load."""
    deployment = Deployment(positions={"eagle3": (0.8, 0.6, 0.4, 0.3, 0.2)}, per_k={1: 0.05, 8: 0.4}, tax=-0.04)
    options = TuneOptions(eagle3_head="head", methods=("eagle3",), out=tmp_path / "run")
    tune(options, measure=deployment, clock=deployment.clock)
    return tmp_path / "run"


def test_a_bundle_gives_a_table(measured):
    found = schedule_of(measured, "vllm")
    assert found.drafts and found.concurrencies == (1, 8)
    rows = found.setting()["num_speculative_tokens_per_batch_size"]
    assert rows[0][:2] == [1, 1] or rows[0][2] > 0
    assert rows[-1][1:] == [LARGEST_BATCH, 0]
    assert found.setting()["model"] == "head"
    assert found.document()["schema"] == "surespec/schedule/1"
    assert min(schedule_of(measured, "trtllm").setting()["draft_len_schedule"].values()) > 0


def test_the_command_prints_it_and_its_code_says_whether_to_draft(measured):
    argv = [sys.executable, "-m", "surespec", "schedule", str(measured), "--engine", "local", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["setting"]["num_speculative_tokens"] == max(row["k"] for row in document["rows"])


def test_what_was_not_measured_is_said(measured, tmp_path):
    with pytest.raises(UsageError, match="the drafter ngram"):
        schedule_of(measured, "vllm", "ngram")
    with pytest.raises(UsageError, match="--engine exllama"):
        schedule_of(measured, "exllama")
    with pytest.raises(BundleError):
        schedule_of(tmp_path / "nowhere", "vllm")
