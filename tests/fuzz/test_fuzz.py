"""A small budget of every surface; ``python benchmarks/fuzz.py --cases 100000`` is the long run."""

from __future__ import annotations

import fuzz_bench
import fuzz_models
import fuzz_recipes
import fuzz_server
import pytest
from fuzz_harness import run_case
from hypothesis import HealthCheck, Phase, given, seed, settings

SURFACES = [s for module in (fuzz_recipes, fuzz_models, fuzz_bench, fuzz_server) for s in module.SURFACES]


@pytest.mark.parametrize("surface", SURFACES, ids=lambda s: s.name)
def test_a_result_or_a_sentence(surface, tmp_path):
    @seed(1)  # the same cases every time: new ones are the long run's work
    @settings(max_examples=surface.quick, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(surface.cases)
    def one(case):
        run_case(surface, case, tmp_path / "case")

    one()
