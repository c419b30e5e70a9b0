"""``surespec`` and ``python -m surespec``."""

import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. Loading it takes a moment, in which Ctrl-C may come too."""
    try:
        from surespec.cli import main as run

        run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.write("surespec: Interrupted.\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
