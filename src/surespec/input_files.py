"""Reading files that a user names: whole, but never without a limit, and never a device that has no end."""

from __future__ import annotations

import stat
from pathlib import Path

from surespec.errors import InputFileError

MIB = 2**20


def read_input(path: Path, *, what: str, most_bytes: int, hint: str = "") -> bytes:
    """All bytes of a file (or of a pipe, as the shell's ``<(...)`` makes them).

    Raises InputFileError when it cannot be read, is a folder or a device, or has more than ``most_bytes``.
    """
    try:
        about = path.stat()
        mode = about.st_mode
        if stat.S_ISDIR(mode):
            raise InputFileError(f"{path} is a directory, not {what}.", hint=hint)
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise InputFileError(f"{path} is a device or a socket, not {what}.", hint=hint)
        with path.open("rb") as file:
            # A file is asked for no more than it has: a buffer of the whole limit would be made for it.
            data = file.read(min(most_bytes, about.st_size if stat.S_ISREG(mode) and about.st_size else most_bytes) + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputFileError(f"{path} cannot be read: {reason}.", hint=hint) from error
    if len(data) > most_bytes:
        raise InputFileError(f"{path} has more than {most_bytes // MIB} MiB, too much for {what}.", hint=hint)
    return data


__all__ = ["MIB", "read_input"]
