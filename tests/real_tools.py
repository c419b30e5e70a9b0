"""For tests that drive real engines: which processes a test left behind, and comparing acceptance."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from surespec.core import Acceptance
from surespec.tune import TuneProgress

_MARK = "SURESPEC_TEST_MARK"


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails when a process started inside (by whomever, in whatever group) still lives at the end."""
    mark, before = uuid.uuid4().hex, os.environ.get(_MARK)
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        del os.environ[_MARK]
        if before is not None:
            os.environ[_MARK] = before
        left = list(_marked(mark))
        for process in left:
            process.kill()
    assert not left, f"left behind: {left}"


def _marked(mark: str) -> Iterator[psutil.Process]:
    """Processes whose environment, inherited when they were started, has the mark."""
    for process in psutil.process_iter():
        try:
            ended = process.status() == psutil.STATUS_ZOMBIE  # and waits for whoever adopted it
            if process.pid != os.getpid() and not ended and process.environ().get(_MARK) == mark:
                yield process
        except psutil.Error:
            continue


def workers(name: str) -> list[psutil.Process]:
    """The descendants of this process with such a title."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if name in " ".join(process.cmdline()) or name in process.name():
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_same_acceptance(ours: Acceptance, theirs: Acceptance) -> None:
    """p_1 ... p_k of two engines within sampling error.

    The drafts of one request follow each other, so they tell less than as many independent ones: each counts as a
    third of one (a design effect of 3), and the bound is three standard errors of the difference.
    """
    assert len(ours.per_position) == len(theirs.per_position)
    for i, (a, b) in enumerate(zip(ours.per_position, theirs.per_position, strict=True), start=1):
        pooled = (a * ours.drafts + b * theirs.drafts) / (ours.drafts + theirs.drafts)
        variance = 3 * pooled * (1 - pooled) * (1 / ours.drafts + 1 / theirs.drafts)
        bound = 3 * math.sqrt(variance) + 0.005
        assert abs(a - b) <= bound, f"p_{i}: embedded engine {a:.3f}, other {b:.3f}, bound {bound:.3f}"


class Stages(TuneProgress):
    """Keeps what ``tune`` told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.notes: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)
