"""What every dialect renders, and how a command line is written so that a shell reads the same arguments back."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surespec.plan_nouns import Device, Drafter, Model, Runtime

_HOME = re.compile(r"^\$HOME/[\w./:-]*$")
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
# A key that YAML reads as a text without quotes (not as a boolean or null).
_PLAIN_KEY = re.compile(r"^(?!(?:y|n|yes|no|on|off|true|false|null)$)[A-Za-z_][\w.-]*$", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Deployment:
    """One launch of a model: what is served where, and the arm's speculation in vLLM's words (None: baseline)."""

    device: Device
    runtime: Runtime
    model: Model
    max_model_len: int
    utilization: float | None = None
    config: Mapping[str, Any] | None = None
    drafter: Drafter | None = None
    kv_dtype: str = "auto"
    max_num_seqs: int | None = None
    batched_tokens: int | None = None
    tensor_parallel: int = 1
    concurrency: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    kubernetes: bool = False
    old_llamacpp_flags: bool = False

    @property
    def method(self) -> str:
        """The arm's method, ``none`` for the baseline."""
        return str(self.config["method"]) if self.config else "none"

    @property
    def k(self) -> int:
        """The arm's number of speculative tokens."""
        return int(self.config.get("num_speculative_tokens", 0)) if self.config else 0


@dataclass(frozen=True)
class Command:
    """A rendered launch. ``text`` is what a person pastes; ``argv`` the server's own arguments (``$HOME/`` unexpanded);
    ``files`` are written beside it first; ``notes`` say what has to be there before."""

    argv: tuple[str, ...]
    text: str
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def compact_json(value: Any) -> str:
    """JSON without spaces, keys in the given order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def quote(argument: str) -> str:
    """The argument for a POSIX shell. A path under ``$HOME/`` is left to the shell to expand."""
    return f'"{argument}"' if _HOME.match(argument) else shlex.quote(argument)


def shell_line(argv: Sequence[str]) -> str:
    """The arguments as one shell line."""
    return " ".join(quote(argument) for argument in argv)


def _yaml_scalar(value: Any) -> str:
    """JSON, with the characters escaped that YAML takes for line breaks or does not allow."""
    text = json.dumps(value, ensure_ascii=False)
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def to_yaml(value: Any, indent: int = 0) -> str:
    """Plain block YAML of dicts, lists and scalars; strings are in JSON's double quotes, which YAML reads."""
    pad = "  " * indent
    if isinstance(value, Mapping) and value:
        lines = []
        for key, entry in value.items():
            plain = isinstance(key, int) or _PLAIN_KEY.match(str(key))
            name = str(key) if plain else _yaml_scalar(str(key))
            nested = isinstance(entry, (Mapping, list, tuple)) and bool(entry)
            lines.append(f"{pad}{name}:" + (f"\n{to_yaml(entry, indent + 1)}" if nested else f" {to_yaml(entry)}"))
        return "\n".join(lines)
    if isinstance(value, (list, tuple)) and value:
        lines = []
        for entry in value:
            block = to_yaml(entry, indent + 1)
            lines.append(f"{pad}- {block.lstrip()}")
        return "\n".join(lines)
    return _yaml_scalar(value)


def docker_prefix(d: Deployment, name: str, entrypoint: str = "") -> list[str]:
    """``docker run`` for a Jetson: the flags of jetson-llm-serve, the caches and a local model mounted."""
    argv = ["docker", "run", "--rm", "-it", "--runtime", "nvidia", "--network", "host"]
    if d.runtime.ipc_host:
        argv += ["--ipc", "host"]
    argv += ["--name", name, "-v", "$HOME/.cache/huggingface:/root/.cache/huggingface"]
    if name == "vllm":
        argv += ["-v", "$HOME/.cache/vllm:/root/.cache/vllm"]  # keeps compiled graphs between launches
    local = [p for p in (d.model.path, d.drafter.id if d.drafter else "") if p.startswith("/")]
    for path in dict.fromkeys(local):
        argv += ["-v", f"{path}:{path}:ro"]
    if d.model.gated or (d.drafter is not None and d.drafter.gated):
        argv += ["-e", "HF_TOKEN"]
    if entrypoint:
        argv += ["--entrypoint", entrypoint]
    return [*argv, d.runtime.image]
