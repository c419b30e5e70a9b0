"""Half against half: what had not settled is cut from all runs, what never settles is said."""

import numpy as np
import pytest

from surespec.core import Acceptance
from surespec.settling import change, settled, step_ms
from test_stats import make_run

RNG = np.random.default_rng(3)


def run(profile, noise=0.01, count=24):
    """A run whose steps take ``profile(share of the run)`` times 20 ms."""
    return make_run([20 * profile(i / count) * float(np.exp(RNG.normal(0, noise))) for i in range(count)])


def flat(_share):
    return 1.0


def test_a_settled_machine_is_left_alone():
    for _ in range(200):
        found = settled([run(flat), run(flat)], [run(flat), run(flat)])
        assert not found.cut and not found.remark


def test_a_warm_up_is_cut_from_every_run_alike():
    slow_start = run(lambda share: 1.15 if share < 0.4 else 1.0)
    found = settled([slow_start, run(flat)], [run(flat), run(flat)])
    assert found.cut and "faster within a run" in found.remark
    kept = {tuple(t.prompt_id for t in r.traces) for r in (*found.baseline, *found.candidate)}
    assert len(kept) == 1 and len(kept.pop()) == 12, "the same prompts stay paired"
    assert found.baseline[0].tpot_ms_p50 == pytest.approx(20, rel=0.02)
    assert found.baseline[0].throughput_tok_s == pytest.approx(found.baseline[1].throughput_tok_s, rel=0.03)


def test_what_never_settles_is_warned_of_and_kept():
    heating = run(lambda share: 1 + 0.3 * share, noise=0.002)
    found = settled([heating], [run(flat)])
    assert not found.cut and "did not settle" in found.remark and "slower" in found.remark
    assert found.baseline == (heating,)


def test_a_drafter_that_drafts_sometimes_tells_nothing_of_the_machine():
    trace = run(flat).traces[0]
    some = Acceptance(drafts=10, drafted=50, accepted=9, accepted_per_position=(9,))
    assert step_ms(trace.model_copy(update={"acceptance": some})) is None
    every = Acceptance(drafts=24, drafted=24, accepted=24, accepted_per_position=(24,))
    assert step_ms(trace.model_copy(update={"acceptance": every})) == pytest.approx(trace.tpot_ms * 49 / 25)


def test_too_few_requests_tell_nothing():
    assert change(run(lambda share: 2.0 if share < 0.5 else 1.0, count=6).traces) == 0.0
