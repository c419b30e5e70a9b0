"""Where facts about a machine come from: the live system, or a captured file system given by ``--root``.

A captured file system is a folder with copies of the files under their own paths (``proc/device-tree/model``,
``etc/nv_tegra_release``, ``proc/meminfo``, ``proc/cpuinfo``, ``etc/nv_boot_control.conf``, ``tmp/nv_jetson_model``,
``sys/fs/cgroup/memory.max``, an empty ``.dockerenv``) and, under ``captured/``, what commands printed: one file a
command, named as in ``COMMANDS``. A file that is not there reads as "not known", as on the live system.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from surespec.errors import InputFileError

MAX_BYTES = 4 * 2**20
TIMEOUT_S = 10.0

# name of the captured file -> the command whose output it holds
COMMANDS: dict[str, tuple[str, ...]] = {
    "nvidia-smi.csv": (
        "nvidia-smi",
        "--query-gpu=name,memory.total,memory.used,memory.free,compute_cap,driver_version",
        "--format=csv,noheader,nounits",
    ),
    "nvidia-smi-apps.csv": ("nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader,nounits"),
    "nvpmodel.txt": ("nvpmodel", "-q"),
    "dpkg-l4t.txt": ("dpkg-query", "--showformat=${Version}", "--show", "nvidia-l4t-core"),
}


@dataclass(frozen=True)
class Machine:
    """The live system (``root`` None) or a captured one."""

    root: Path | None = None

    def __post_init__(self) -> None:
        if self.root is not None and not self.root.is_dir():
            raise InputFileError(
                f"--root {self.root}: there is no such folder.", hint="Give a folder with copies of proc/, etc/ ..."
            )

    @property
    def captured(self) -> bool:
        """True when a captured file system is read."""
        return self.root is not None

    def read(self, path: str) -> str:
        """A file's text without NUL bytes and outer white space; empty when it cannot be read."""
        file = (self.root or Path("/")) / path.lstrip("/")
        try:
            with file.open("rb") as handle:
                data = handle.read(MAX_BYTES)
        except OSError:
            return ""
        return data.replace(b"\0", b"").decode("utf-8", errors="replace").strip()

    def exists(self, path: str) -> bool:
        """True when the file is there."""
        return ((self.root or Path("/")) / path.lstrip("/")).exists()

    def output(self, name: str) -> str:
        """What a command of ``COMMANDS`` printed; empty when it is missing, fails or hangs."""
        if self.root is not None:
            return self.read(f"captured/{name}")
        try:
            done = subprocess.run(
                COMMANDS[name],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
                env={**os.environ, "LC_ALL": "C"},
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""
