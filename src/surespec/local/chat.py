"""Chat templates: a model's own Jinja text, rendered in a sandbox and in a process of its own (``template_child.py``),
because it comes out of a downloaded file."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surespec.errors import ConfigError

_CHILD = Path(__file__).with_name("template_child.py")
_KEPT_VARIABLES = ("TZ", "LD_LIBRARY_PATH")
_CHECK = "Check the roles, their order and the content of each message."


class _Renderer:
    """The process that renders, started when it is first needed and again after a template has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        """The child's answer: ``text`` or ``error``."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            used = self._child is not None
            answer, ending = self._exchange(line)
            if answer is None and used and ending not in (-signal.SIGPROF, 1):  # it had been ended from outside
                answer, ending = self._exchange(line)
        if answer is not None:
            return answer
        slow = ending == -signal.SIGPROF
        return {"error": "it computes for too long" if slow else "it needs too much memory, or cannot be started"}

    def _exchange(self, line: bytes) -> tuple[dict[str, str] | None, int]:
        """The answer; or None and how the child ended."""
        answer = b""
        with contextlib.suppress(OSError):
            child = self._started()
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(line)
            child.stdin.flush()
            answer = child.stdout.readline()
        if answer.endswith(b"\n"):
            found: dict[str, str] = json.loads(answer)
            return found, 0
        return None, self.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            found = (importlib.util.find_spec(name) for name in ("jinja2", "markupsafe"))
            folders = dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin)
            self._child = subprocess.Popen(
                [sys.executable, "-I", str(_CHILD), *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            )
        return self._child

    def close(self) -> int:
        """End the child; its exit code."""
        child, self._child = self._child, None
        if child is None:
            return 1
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            return child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


_renderer = _Renderer()
atexit.register(_renderer.close)


class ChatTemplate:
    """A template. ConfigError when it is missing or cannot be compiled, and when it refuses the messages."""

    def __init__(self, source: str | None, bos_token: str = "", eos_token: str = "") -> None:
        if not source:
            raise ConfigError(
                "This model has no chat template, so chat messages cannot be turned into a prompt.",
                hint="Send the plain text to /v1/completions instead.",
            )
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        if (why := _renderer.ask({"source": source}).get("error")) is not None:
            raise ConfigError(f"The model's chat template cannot be compiled: {why}.")

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text for ``messages``; ``variables`` are further names the template may read."""
        given = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) if tools else None,
            **self._tokens,
            **variables,
        }
        answer = _renderer.ask({"source": self._source, "variables": given})
        if (why := answer.get("error")) is not None:
            raise ConfigError(f"The model's chat template refused the messages: {why}.", hint=_CHECK)
        return answer["text"]
