"""The nouns of recipes: what was read, what is wrong with it, what a patch makes of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from surespec.errors import plain
from surespec.recipe.flags import Parsed
from surespec.recipe.locate import Server
from surespec.recipe.text import Source

Kind = Literal["docker", "compose", "cmdline", "systemd", "kubernetes", "dynamo", "dynamo_script"]
SECRET = re.compile(r"api[-_]?key|token(?!s|iz)|secret|passw|credential", re.I)
"""What is a secret by its name, be it a flag or a variable; counts of tokens and tokenizers are none."""


@dataclass(frozen=True)
class Diagnosis:
    """Something wrong in a recipe. ``fix`` says what a patch will do, or what the user has to."""

    name: str
    line: int
    sentence: str
    fix: str

    def __post_init__(self) -> None:
        """Both texts quote the recipe, so they are made ``plain``."""
        object.__setattr__(self, "sentence", plain(self.sentence))
        object.__setattr__(self, "fix", plain(self.fix))

    def __str__(self) -> str:
        return f"line {self.line}: {self.sentence} {self.fix}"


@dataclass(frozen=True)
class Recipe:
    """The text that starts a deployment, read. Empty texts and None mean that the recipe does not say.

    ``engine``: vllm, sglang, trtllm, llamacpp, dynamo (its vLLM worker), dynamo-sglang, dynamo-trtllm. ``port`` is the
    one clients use (the published one of a container). ``flags`` are the engine's flags by canonical name (None: a
    switch; secrets as ``***``); ``env`` only names. ``speculative_config`` is in vLLM's words whatever the engine;
    ``speculates`` is true also when a program computes it.
    """

    path: Path
    kind: Kind
    engine: str
    image: str = ""
    engine_version: str = ""
    model: str = ""
    served_model_name: str = ""
    host: str = ""
    port: int | None = None
    service: str = ""
    env: tuple[str, ...] = ()
    flags: dict[str, Any] = field(default_factory=dict)
    speculative_config: dict[str, Any] | None = None
    speculates: bool = False
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: str = ""
    tensor_parallel_size: int | None = None
    dtype: str = ""
    quantization: str = ""
    diagnoses: tuple[Diagnosis, ...] = ()
    index: int = 0
    source: Source = field(default=Source("", ""), repr=False)
    server: Server = field(default=Server("", ()), repr=False)
    parsed: Parsed = field(default=Parsed((), ()), repr=False)

    def document(self) -> dict[str, Any]:
        """What was read, for JSON."""
        skipped = {"source", "server", "index", "parsed", "diagnoses", "path"}
        body = {k: v for k, v in self.__dict__.items() if k not in skipped}
        return {"path": str(self.path), **body, "diagnoses": [vars(d) for d in self.diagnoses]}


@dataclass(frozen=True)
class Patched:
    """A changed recipe. ``data`` are the file's new bytes; ``diff`` is empty when nothing changes."""

    data: bytes
    text: str
    diff: str
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.diff)


def flag_values(parsed: Parsed) -> dict[str, Any]:
    """The flags as a plain dict; a flag given twice counts as its last, secrets are hidden."""
    out: dict[str, Any] = {}
    for flag in parsed.flags:
        value: Any = flag.value
        if flag.inline is None and len(flag.values) > 1:
            value = [arg.text for arg in flag.values]
        out[flag.name] = "***" if value is not None and SECRET.search(flag.name) else value
    return out
