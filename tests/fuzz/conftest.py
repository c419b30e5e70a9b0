"""Lets the tests (and ``benchmarks/fuzz.py``) import the surfaces by their plain names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
