"""Reading files that a user names: whole, but never without a limit, and never a device that has no end."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from surespec.errors import InputFileError

MIB = 2**20


def read_input(path: Path, *, what: str, most_bytes: int, hint: str = "") -> bytes:
    """All bytes of a file (or of a pipe, as the shell's ``<(...)`` makes them).

    Raises InputFileError when it cannot be read, is a folder or a device, or has more than ``most_bytes``.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise InputFileError(f"{path} is a directory, not {what}.", hint=hint)
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise InputFileError(f"{path} is a device or a socket, not {what}.", hint=hint)
        with path.open("rb") as file:
            data = b"".join(_pieces(file, most_bytes + 1))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputFileError(f"{path} cannot be read: {reason}.", hint=hint) from error
    if len(data) > most_bytes:
        raise InputFileError(f"{path} has more than {most_bytes // 1024} KiB, too much for {what}.", hint=hint)
    return data


def _pieces(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """Up to ``most_bytes``, a piece at a time: one read of that size would make a buffer of that size."""
    while most_bytes > 0 and (piece := file.read(min(MIB, most_bytes))):
        most_bytes -= len(piece)
        yield piece


__all__ = ["MIB", "read_input"]
