"""``python -m surespec``."""

from surespec.cli import main

main()
