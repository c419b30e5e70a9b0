"""Lets the suites import their rig."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
