"""A short soak of the embedded server; ``python benchmarks/soak.py --minutes 60`` is the long one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from toy import make_llama

FILE = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def test_ten_seconds_with_sixteen_clients(soak, tmp_path):
    problems, seen = soak.soak(str(make_llama(tmp_path)), 10, 16, soak.DRAFTING, seed=1)
    assert problems == []
    kinds = {
        "greedy, compared",
        "stop texts, compared",
        "cut off",
        "malformed",
        "sampled",
        "several choices",
        "changes of k",
    }
    assert kinds <= set(seen.counts)


@pytest.mark.model
def test_a_minute_with_the_real_model(soak):
    problems, seen = soak.soak("smollm2-135m", 60, 16, soak.DRAFTING, seed=2)
    assert problems == []
    assert seen.counts["greedy, compared"] > 5


def test_it_sees_what_it_is_there_for(soak):
    bad = soak.Seen(
        wrong=["greedy: 'a' instead of 'b'"],
        rss_mb=[100.0 + 2 * i for i in range(100)],
        files=[10, 100],
        threads=[5, 50],
    )
    said = " ".join(soak.findings(bad))
    for word in ("wrong answer", "memory grows", "open files grow", "threads grow"):
        assert word in said
    assert soak.findings(soak.Seen(rss_mb=[100.0] * 100, files=[10, 11], threads=[5, 5])) == []
