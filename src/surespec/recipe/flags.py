"""The flags of each engine, as far as a recipe needs them: spellings, which take a value, which speculate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from surespec.recipe.arguments import Arg
from surespec.recipe.text import Char, text_of

SPEC_FLAG = "--speculative-config"

_SHORT = {
    "vllm": {"-sc": SPEC_FLAG, "-tp": "--tensor-parallel-size", "-q": "--quantization",
             "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size",
             "-O": "--optimization-level", "-cc": "--compilation-config"},
    "sglang": {"--model": "--model-path", "--tp": "--tp-size", "--tensor-parallel-size": "--tp-size",
               "--speculative-draft-model": "--speculative-draft-model-path",
               "--speculative-algo": "--speculative-algorithm"},
    "llamacpp": {"-m": "--model", "-c": "--ctx-size", "-ngl": "--n-gpu-layers", "--gpu-layers": "--n-gpu-layers",
                 "-np": "--parallel", "-hf": "--hf-repo", "-hfr": "--hf-repo", "-md": "--model-draft",
                 "--spec-draft-model": "--model-draft", "-hfd": "--hf-repo-draft", "-a": "--alias",
                 "-ctk": "--cache-type-k", "-ctv": "--cache-type-v",
                 "--draft": "--draft-max", "--draft-n": "--draft-max",
                 "-ngld": "--n-gpu-layers-draft", "-fa": "--flash-attn"},
    "trtllm": {"--extra_llm_api_options": "--config", "--extra-llm-api-options": "--config", "--tp-size": "--tp-size"},
}  # fmt: skip

_SWITCHES = {
    "--enforce-eager", "--trust-remote-code", "--headless", "--async-scheduling", "--language-model-only",
    "--skip-tokenizer-init", "--metrics", "--jinja", "--cont-batching", "--mlock", "--no-mmap", "--embedding",
    "--verbose", "-v", "-cb", "--spec-default", "--calculate-kv-scales", "--return-tokens-as-token-ids",
    "--speculative-adaptive", "--speculative-use-rejection-sampling", "--log-requests",
}  # fmt: skip
_SWITCH_PREFIXES = ("--enable-", "--disable-", "--no-", "--is-", "--use-")
_VALUED = {"--enable-torch-compile-max-bs"}
_SEVERAL = {
    "--served-model-name", "--lora-modules", "--allowed-origins", "--middleware", "--cudagraph-capture-sizes",
    "--cuda-graph-bs", "--lora-paths",
}  # fmt: skip

LEGACY_VLLM = {  # vLLM 0.9 and older -> the key of the JSON that replaced it
    "--speculative-model": "model",
    "--num-speculative-tokens": "num_speculative_tokens",
    "--speculative-draft-tensor-parallel-size": "draft_tensor_parallel_size",
    "-spec-draft-tp": "draft_tensor_parallel_size",
    "--speculative-model-quantization": "quantization",
    "--speculative-max-model-len": "max_model_len",
    "--speculative-disable-by-batch-size": "disable_by_batch_size",
    "--ngram-prompt-lookup-max": "prompt_lookup_max",
    "--ngram-prompt-lookup-min": "prompt_lookup_min",
    "--spec-decoding-acceptance-method": "acceptance_method",
    "--typical-acceptance-sampler-posterior-threshold": "posterior_threshold",
    "--typical-acceptance-sampler-posterior-alpha": "posterior_alpha",
    "--disable-logprobs-during-spec-decoding": "disable_logprobs",
    "--speculative-disable-mqa-scorer": "disable_mqa_scorer",
}
SHORTHAND_VLLM = {  # vLLM 0.22 and newer
    "--spec-method": "method",
    "--spec-model": "model",
    "--spec-tokens": "num_speculative_tokens",
}
_SPEC_LLAMACPP = re.compile(
    r"--(spec-.*|model-draft|hf-repo-draft|draft(-.*)?|n-gpu-layers-draft|device-draft|ctx-size-draft|cache-type-[kv]-draft"
    r"|lookup-cache-.*)$|-(ctkd|ctvd|cd|devd)$"
)


def dialect(engine: str) -> str:
    """The engine whose flags are meant: Dynamo's workers take those of their engine."""
    return {"dynamo": "vllm", "dynamo-sglang": "sglang", "dynamo-trtllm": "trtllm"}.get(engine, engine)


@dataclass(frozen=True)
class Flag:
    """One flag of an engine. ``name`` is its canonical spelling, ``arg`` where it stands.

    ``values`` are the arguments after it; ``inline`` is the part after ``=`` (None when there is no ``=``).
    """

    name: str
    arg: Arg
    values: tuple[Arg, ...] = ()
    inline: tuple[Char, ...] | None = None

    @property
    def args(self) -> tuple[Arg, ...]:
        """Everything that would have to go with the flag."""
        return (self.arg, *self.values)

    @property
    def value(self) -> str | None:
        """The value; None for a switch."""
        if self.inline is not None:
            return text_of(self.inline)
        return self.values[0].text if self.values else None

    @property
    def unknown(self) -> tuple[str, ...]:
        """What in it only running the recipe would tell."""
        return tuple(u for a in self.args for u in a.unknown)


@dataclass(frozen=True)
class Parsed:
    """An engine's arguments."""

    flags: tuple[Flag, ...]
    positional: tuple[Arg, ...]

    def all(self, name: str) -> list[Flag]:
        """Every occurrence of a flag."""
        return [flag for flag in self.flags if flag.name == name]

    def last(self, *names: str) -> Flag | None:
        """The occurrence that counts: the last."""
        found = [flag for flag in self.flags if flag.name in names]
        return found[-1] if found else None


def parse_flags(engine: str, args: Sequence[Arg]) -> Parsed:
    """Sort an engine's arguments into flags and the rest. A word after a flag that takes a value is its value."""
    flags: list[Flag] = []
    rest: list[Arg] = []
    i = 0
    while i < len(args):
        arg = args[i]
        i += 1
        if not is_flag(arg.text):
            rest.append(arg)
            continue
        spelled, equals, _ = arg.text.partition("=")
        name = canonical(spelled, engine)
        if equals:
            flags.append(Flag(name, arg, inline=arg.chars[len(spelled) + 1 :]))
            continue
        taken = _values(name, args[i:])
        flags.append(Flag(name, arg, tuple(taken)))
        i += len(taken)
    return Parsed(tuple(flags), tuple(rest))


def is_flag(text: str) -> bool:
    """True for ``--x`` and ``-x``; a negative number is a value."""
    return bool(re.match(r"--?[A-Za-z]", text))


def canonical(spelled: str, engine: str) -> str:
    """One spelling for all: dashes for underscores (before a dot, which begins a JSON key), long for short."""
    head, dot, tail = spelled.partition(".")
    if head.startswith("--") and dialect(engine) in ("vllm", "sglang", "trtllm", ""):
        head = head.replace("_", "-")
    short = _SHORT.get(dialect(engine), {})
    return short.get(head, head) + dot + tail


def takes_value(name: str) -> bool:
    """Whether a flag is followed by a value, as far as its name tells."""
    return name not in _SWITCHES and (name in _VALUED or not name.startswith(_SWITCH_PREFIXES))


def _values(name: str, following: Sequence[Arg]) -> list[Arg]:
    if not takes_value(name):
        return []
    limit = len(following) if name in _SEVERAL else 1
    taken: list[Arg] = []
    for arg in following[:limit]:
        if is_flag(arg.text):
            break
        taken.append(arg)
    return taken


def speculative_flags(parsed: Parsed, engine: str) -> list[Flag]:
    """The flags that set up speculation."""
    kind = dialect(engine)
    if kind == "vllm":
        names = {SPEC_FLAG, *LEGACY_VLLM, *SHORTHAND_VLLM}
        return [f for f in parsed.flags if f.name in names or f.name.startswith(SPEC_FLAG + ".")]
    if kind == "sglang":
        return [f for f in parsed.flags if f.name.startswith("--speculative-")]
    if kind == "llamacpp":
        return [f for f in parsed.flags if _SPEC_LLAMACPP.match(f.name)]
    return []
