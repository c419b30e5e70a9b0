"""Runs surespec's command line with another environment's interpreter (Dynamo's), which has what surespec imports but
not surespec itself: this very copy is taken, wherever it lies, and nothing else beside it.

    /path/of/dynamo/python /path/of/surespec/engines/dynamo_boot.py serve --dynamo ...
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Make this copy importable as ``surespec`` and run its command line."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    package = here.parent
    spec = importlib.util.spec_from_file_location(
        "surespec", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        raise SystemExit(f"surespec: {package} is not a copy of surespec.")
    module = importlib.util.module_from_spec(spec)
    sys.modules["surespec"] = module
    spec.loader.exec_module(module)
    from surespec.cli import main as run

    run()


if __name__ == "__main__":
    main()
