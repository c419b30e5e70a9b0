"""Take the picture of a report for the README: report.html of a bundle (or any page) -> docs/report.png.

    python tools/screenshot_report.py DIR [--out docs/report.png] [--width 1200] [--height 2400] [--dark]

Needs Chromium or Chrome on PATH (or --browser PATH). The browser runs without a network, in a profile of its own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    # Nothing in a report may need the network; this makes sure that the picture shows it as it is offline.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def main() -> int:
    """Returns 0, or 1 with one sentence on stderr."""
    parser = argparse.ArgumentParser(description="Picture of a report, by headless Chromium.")
    parser.add_argument("report", type=Path, help="a bundle folder or an HTML file")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "report.png")
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=2400)
    parser.add_argument("--dark", action="store_true", help="as in a browser set to dark mode")
    parser.add_argument("--browser", default=None)
    options = parser.parse_args()
    page = options.report / "report.html" if options.report.is_dir() else options.report
    browser = options.browser or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(
            "No Chromium or Chrome found; install one (apt install chromium) or name it by --browser.", file=sys.stderr
        )
        return 1
    if not page.is_file():
        print(f"{page} does not exist; run 'surespec report DIR' first.", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return shoot(browser, page.resolve(), options.out.resolve(), options.width, options.height, dark=options.dark)


def shoot(browser: str, page: Path, out: Path, width: int, height: int, *, dark: bool) -> int:
    """Run the browser once and check that it wrote the picture."""
    with tempfile.TemporaryDirectory(prefix="report-shot-") as profile:
        command = [
            browser,
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--screenshot={out}",
            f"--window-size={width},{height}",
        ]
        if dark:
            command.append("--blink-settings=preferredColorScheme=0")
        out.unlink(missing_ok=True)
        done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    if not out.is_file():
        print(f"{browser} wrote no picture (exit {done.returncode}): {done.stderr.strip()[-400:]}", file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
