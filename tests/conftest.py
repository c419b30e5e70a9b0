"""Lets every test import the shared makers (``from toy import make_llama``)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
