"""What clients send to the embedded server, and what people type as numbers on the command line."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from fuzz_harness import Case, Finding, Surface, expect
from fuzz_mutations import NASTY_NUMBERS, NASTY_TEXTS, Raw, json_texts, trees
from hypothesis import strategies as st

import toy
from surespec import cli
from surespec.errors import SurespecError
from surespec.local.app import Api
from surespec.local.openai_api import ChatRequest, CompletionRequest, Limits, RequestError, parse_json, parse_request
from surespec.local.tokenizer import Tokenizer, load_tokenizer
from surespec.local.weights import load_model_files

# -- bodies ----------------------------------------------------------------------------------------------------------------

_CHAT = {
    "model": "toy", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"}],
    "max_tokens": 5, "max_completion_tokens": 6, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "n": 2, "stop": ["a"], "stream": True,
    "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2, "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto", "response_format": {"type": "text"}, "stop_token_ids": [3], "ignore_eos": True, "logit_bias": {}, "presence_penalty": 0,
}  # fmt: skip
_PLAIN = {
    "model": "toy",
    "prompt": "hello",
    "max_tokens": 5,
    "logprobs": 2,
    "echo": False,
    "suffix": "",
    "stop": "x",
    "seed": -3,
}
_IDS = {"prompt": [[1, 2], [3]], "n": 1, "min_tokens": 0, "user": "u", "metadata": {"a": 1}}
_BODIES = (_CHAT, _CHAT, _PLAIN, _IDS)


@cache
def tokenizer() -> Tokenizer:
    """The toy model's."""
    with TemporaryDirectory() as name:
        files = load_model_files(
            toy.make_llama(
                Path(name) / "m", hidden=8, layers=1, heads=2, kv_heads=1, head_dim=4, intermediate=8, vocab=280
            )
        )
        return load_tokenizer(files)


def _check_body(body: Case, _folder: Path) -> None:
    """From the bytes of a body to the engine's parameters, as both routes do it."""
    document = parse_json(body)
    kinds: tuple[Any, ...] = (ChatRequest,) if "messages" in document else (CompletionRequest,)
    limits = Limits(512, 4096)
    app = mock.Mock(tokenizer=tokenizer())
    for kind in kinds:
        ask = parse_request(document, kind)
        if isinstance(ask, ChatRequest):
            prompts = [Api._encode_chat(app, ask)]
        else:
            prompts = [Api._encode(app, prompt, ask) for prompt in ask.prompts]
        for ids in prompts:
            params = ask.sampling(limits.output_tokens(len(ids), ask.token_limit))
            expect(params.max_tokens <= 512, "more tokens than fit")


def _words(error: RequestError) -> RequestError:
    expect(400 <= error.status < 500, "a refusal that is not the client's", str(error.status))
    json.dumps(error.body).encode()
    return error


def _check_request(body: Case, folder: Path) -> None:
    try:
        _check_body(body, folder)
    except RequestError as error:
        raise _words(error) from None


_bodies = st.one_of(
    json_texts(_BODIES),
    json_texts(_BODIES),
    trees(_BODIES).map(lambda t: json.dumps(t).encode() if not _raw(t) else b"[]"),
    st.binary(max_size=60),
)


def _raw(tree: Any) -> bool:
    if isinstance(tree, Raw):
        return True
    if isinstance(tree, dict):
        return any(map(_raw, tree.values()))
    return any(map(_raw, tree)) if isinstance(tree, list) else isinstance(tree, int) and abs(tree) > 10**4000


# -- the command line ----------------------------------------------------------------------------------------------------------

_odd = st.one_of(
    st.sampled_from(tuple(str(n) for n in NASTY_NUMBERS if abs(n) < 10**4000)), st.sampled_from(tuple(t for t in NASTY_TEXTS if "\0" not in t)),
    st.sampled_from(("1,8", "8,1,1", "1,,2", ",", "1;8", "1.5", "nan", "inf", "-inf", "1e3", "1_000", " 1", "+1", "١", "20m", "1h", "0.5s", "-5m", "m", "0x10", "1e400", "99999h")),
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=6), st.integers(-5, 5000).map(str),
)  # fmt: skip
_TUNE = ("--concurrency", "--budget", "--num-prompts", "--output-len", "--temperature", "--policy", "--prompts", "--precision", "--max-model-len", "--workers",
         "--router-mode", "--engine", "--model", "--endpoint", "--draft-model", "--eagle3-head", "--discovery", "--service", "--recipe", "--engine-python", "--out")  # fmt: skip
_PLAN = ("--concurrency", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization", "--kv-cache-dtype", "--tensor-parallel-size",
         "--port", "--host", "--engine", "--engine-version", "--image", "--l4t", "--device", "--drafter", "--model")  # fmt: skip
_BENCH = (
    "--concurrency",
    "--num-prompts",
    "--input-len",
    "--output-len",
    "--temperature",
    "--top-p",
    "--seed",
    "--api",
    "--timeout",
    "--format",
    "--prompts",
    "--endpoint",
)
_APPLY = ("--speculative-config", "--gpu-memory-utilization", "--service")
_COMMANDS = {
    "tune": (["tune", "--dry-run", "--json"], _TUNE),
    "plan": (["plan", "--json", "--offline", "--device", "thor-t5000", "--model", "Qwen/Qwen3-8B"], _PLAN),
    "plan text": (["plan", "--offline", "--device", "orin-nano-8gb", "--model", "Qwen/Qwen3-8B"], _PLAN),
    "bench": (["bench", "--endpoint", "http://127.0.0.1:9", "--json"], _BENCH),
    "apply": (["apply", "--dry-run", "--recipe", "run.sh"], _APPLY),
    "probe": (["probe", "--json", "--offline", "--device", "thor-t5000"], ("--device", "--l4t", "--model", "--root", "--endpoint")),
    "explain": (["explain"], ()),
    "schedule": (["schedule"], ("--engine", "--method")),
    "judge": (["judge", "a.json"], ("--policy",)),
}  # fmt: skip


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """A command with one to three of its options given something odd."""
    start, flags = _COMMANDS[draw(st.sampled_from(sorted(_COMMANDS)))]
    words = list(start)
    for flag in draw(st.lists(st.sampled_from(flags), min_size=1, max_size=3, unique=True)) if flags else ():
        words += [flag, draw(_odd)] if draw(st.integers(0, 5)) else [f"{flag}={draw(_odd)}"]
    if draw(st.integers(0, 3)) == 0 or not flags:
        words.append(draw(_odd))
    return words


def run_command(words: list[str], folder: Path) -> tuple[int, str, str]:
    """Exit code and output of a command, in this process, with the streams a terminal in UTF-8 has."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    handlers = mock.patch("signal.signal")
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), handlers:
        with mock.patch.object(sys, "argv", ["surespec", *words]):
            try:
                cli.main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
    out.flush()
    err.flush()
    return code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()  # type: ignore[attr-defined]


def _check_command(words: Case, folder: Path) -> None:
    """An exit code that is documented; on failure words on stderr, and nothing that a terminal would obey."""
    (folder / "run.sh").write_text("vllm serve Qwen/Qwen3-8B --port 8000 --gpu-memory-utilization 0.9\n")
    with mock.patch("surespec.models.hub._reachable", return_value=False):
        code, out, err = run_command(words, folder)
    what = f"{words[0]}: "
    if "This is a bug in surespec" in err:
        raise Finding(f"{what}{err.split('failed: ')[1][:60]!r}", err[:300])
    expect(code in (0, 1, 2, 10, 11, 12), f"{what}exit code {code}")
    expect(code not in (1, 2) or err.strip(), f"{what}fails without a word")
    raw = [c for c in err.replace("\n", "") if not c.isprintable()]
    expect(not raw, f"{what}control characters on stderr", repr(err[:300]))
    expect(code in (0, 10, 11, 12) or len(err) < 2000, f"{what}{len(err)} characters on stderr", err[:200])
    if code == 0 and "--json" in words and out.strip():
        json.loads(out, parse_constant=_no_constant)


def _no_constant(name: str) -> float:
    raise Finding("JSON with a constant that is none", name)


def _check_durations(case: Case, _folder: Path) -> None:
    """The readers of numbers by themselves, far more often than through whole commands."""
    from surespec.cli_plan import parse_concurrency

    flag, text = case
    for reader in (
        lambda t: cli._numbers("--concurrency", t),
        lambda t: cli._duration("--budget", t),
        parse_concurrency,
    ):
        with contextlib.suppress(SurespecError):
            reader(text)
    getattr(cli, flag)("--flag", text)


SURFACES = (
    Surface("http-body", _bodies, _check_request, also=(RequestError,), share=2),
    Surface("command-line", lines(), _check_command, share=0.2, quick=15),
    Surface("numbers", st.tuples(st.sampled_from(("_numbers", "_duration")), _odd), _check_durations, share=1),
)  # fmt: skip
