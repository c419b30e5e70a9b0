"""A small budget of every surface; ``python benchmarks/fuzz.py --cases 100000`` is the long run.

Each surface runs in a process of its own with little memory, as in the long run: a case that takes all memory must not
take the machine with it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"


@pytest.mark.timeout(300)
def test_everything_that_is_read_gives_a_result_or_a_sentence(tmp_path):
    command = [sys.executable, str(DRIVER), "--cases", "400", "--seed", "1", "--findings", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings" in done.stdout


def test_what_was_found_once_stays_mended():
    """The inputs of earlier findings, by surface."""
    found = Path(__file__).parent / "found"
    done = subprocess.run([sys.executable, str(DRIVER), "--replay", str(found)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = dict(line.split(": ") for line in done.stdout.splitlines())
    assert len(outcomes) == len(list(found.glob("*.txt"))) > 20
    assert set(outcomes.values()) <= {"read", "refused"}
