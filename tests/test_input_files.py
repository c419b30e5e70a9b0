"""Files that a user names are read whole, but never without a limit."""

import os
import subprocess
import sys
import threading

import pytest

from surespec.errors import InputFileError
from surespec.input_files import MIB, read_input


def test_a_file_and_a_pipe_are_read_whole(tmp_path):
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_bytes(b"abc")
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"def",))
    writer.start()
    assert read_input(file, what="a recipe", most_bytes=3) == b"abc"
    assert read_input(pipe, what="a recipe", most_bytes=3) == b"def"
    writer.join()


@pytest.mark.parametrize(
    ("name", "said"), [("missing", "cannot be read"), (".", "is a directory"), ("/dev/zero", "is a device")]
)
def test_what_is_no_file_is_refused(tmp_path, name, said):
    with pytest.raises(InputFileError, match=said):
        read_input(tmp_path / name, what="a recipe", most_bytes=MIB)


def test_too_much_is_refused(tmp_path):
    file = tmp_path / "big"
    file.write_bytes(b"x" * (MIB + 1))
    with pytest.raises(InputFileError, match="more than 1024 KiB"):
        read_input(file, what="a recipe", most_bytes=MIB)


@pytest.mark.parametrize(
    "argv",
    [
        ["apply", "--speculative-config", '{"method":"ngram","num_speculative_tokens":3}', "--recipe"],
        ["plan", "--recipe"],
        ["bench", "--endpoint", "http://127.0.0.1:9", "--prompts"],
        ["judge", "/dev/zero"],
    ],
)
def test_every_command_refuses_an_endless_file(argv):
    done = subprocess.run(
        [sys.executable, "-m", "surespec", *argv, "/dev/zero"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
