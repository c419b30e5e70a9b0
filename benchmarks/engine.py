"""How fast is the embedded engine? One command, one machine, one run.

    python benchmarks/engine.py [--quick] [--out engine.json]
        [--transformers-python PY] [--vllm-python PY] [--llama-server BIN]

Compares, for one model: plain decoding with the bare weight products of the same shapes (no engine on this runtime can
be faster), the cost of verifying 5 tokens over 1, what n-gram and EAGLE-3 drafting gain, and other engines where they
are installed. Things that are compared are measured in turns and as ratios within this run; an absolute number is only
true for this machine in this minute. The targets at the end are said to be reached or not; they never fail the command.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from embedded import PROMPT, Effort, against_bound, plain_tok_s, prompt_ids, speculation
from servers import compare, llama_cpp, ours, vllm
from surespec.errors import SurespecError
from surespec.fetch import fetch, known_models, resolve_model
from surespec.local.graph import default_threads
from surespec.local.tokenizer import load_tokenizer
from surespec.local.weights import load_model_files

FULL = Effort(rounds=3, prompts=8, max_tokens=96, step_repeats=10)
QUICK = Effort(rounds=1, prompts=2, max_tokens=32, step_repeats=5)
BUSY_LOAD = 0.7  # one-minute average; above it something else computes
SECTIONS = ("bound", "speculation", "transformers", "vllm", "llama.cpp")
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Target:
    """One line of what was promised. ``got`` is None when it was not measured."""

    text: str
    wanted: float
    got: float | None
    at_least: bool = True

    @property
    def answer(self) -> str:
        """reached, not reached or not measured."""
        if self.got is None:
            return "not measured"
        passed = self.got >= self.wanted if self.at_least else self.got <= self.wanted
        return "reached" if passed else "not reached"


def main() -> None:
    """Measure what was asked for, print tables, write the JSON document."""
    options = _arguments()
    # As Ctrl-C: the servers and the other Python that were started are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    effort = QUICK if options.quick else FULL
    results: dict[str, Any] = {"schema": "surespec/engine-benchmark/1", "model": options.model, "quick": options.quick}
    results |= {"threads": options.threads, "load_at_start": os.getloadavg()[0]}
    if results["load_at_start"] > BUSY_LOAD:
        _say(f"This machine is busy (load {results['load_at_start']:.1f}): the ratios below will be noise.")
    for section in options.only:
        _say(f"measuring: {section}")
        try:
            results[section] = _MEASURE[section](options, effort)
        except (SurespecError, RuntimeError, OSError, subprocess.SubprocessError) as error:
            results[section] = {"skipped": str(error)}
        if "skipped" in results[section]:
            _say(f"  skipped: {results[section]['skipped']}")
        _write(results, options.out)
    results["targets"] = [{**asdict(t), "answer": t.answer} for t in targets(results)]
    console = Console()
    show(results, console if console.is_terminal else Console(width=110))
    _write(results, options.out)


def _write(results: dict[str, Any], out: Path | None) -> None:
    """After every section, so that a run that is stopped keeps what it measured."""
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed of the embedded engine beside its bound and other engines.")
    parser.add_argument("--model", default="smollm2-135m", help="name or path")
    parser.add_argument("--head", default="smollm2-135m-eagle3", help="EAGLE-3 head: name or folder")
    parser.add_argument("--hf-model", type=Path, help="the model as a Hugging Face folder (default: made from --model)")
    parser.add_argument("--transformers-python", help="a Python that has torch and transformers")
    parser.add_argument("--vllm-python", help="a Python that has vLLM's CPU build")
    parser.add_argument("--llama-server", help="path of llama.cpp's llama-server")
    parser.add_argument("--gguf", type=Path, help="the 4-bit file for llama.cpp (default: --model)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--quick", action="store_true", help="less of everything: a look, not a result")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    return parser.parse_args()


def _bound(options: argparse.Namespace, effort: Effort) -> dict[str, Any]:
    files = load_model_files(resolve_model(options.model))
    precisions = ("fp32", "int4") if options.quick else ("fp32", "int8", "int4")
    return {p: against_bound(options.model, files, p, options.threads, effort) for p in precisions}


def _speculation(options: argparse.Namespace, effort: Effort) -> dict[str, Any]:
    eagle = {"method": "eagle3", "model": options.head}
    ngram_ks, eagle_ks = ((8,), (1, 3)) if options.quick else ((4, 8, 12, 16), (1, 2, 3, 4, 5))
    found = {}
    for precision in ("fp32", "int4"):
        for name, config, category, ks in (("ngram", NGRAM, "copy", ngram_ks), ("eagle3", eagle, "chat", eagle_ks)):
            key = f"{name} {precision}"
            try:
                found[key] = speculation(options.model, precision, options.threads, effort, config, category, ks)
            except SurespecError as error:
                found[key] = {"skipped": str(error)}
    return found


def _transformers(options: argparse.Namespace, effort: Effort) -> dict[str, Any]:
    if not options.transformers_python:
        return {"skipped": "give --transformers-python"}
    tokenizer = load_tokenizer(load_model_files(resolve_model(options.model)))
    work = {
        "model": str(_hf_folder(options)),
        "threads": options.threads,
        "chat": prompt_ids(tokenizer, "chat", effort.prompts),
        "copy": prompt_ids(tokenizer, "copy", effort.prompts),
        "max_tokens": effort.max_tokens,
        "lookup": 8,
    }
    script = Path(__file__).with_name("transformers_peer.py")
    # Ours before and after, so that a slow minute of the machine does not decide the ratio.
    beside = [plain_tok_s(options.model, "fp32", options.threads, effort)]
    done = subprocess.run(
        [options.transformers_python, str(script)],
        input=json.dumps(work),
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    beside.append(plain_tok_s(options.model, "fp32", options.threads, effort))
    return answer | {"engine_tok_s": {n: (beside[0][n] + beside[1][n]) / 2 for n in ("1", "8")}}


def _vllm(options: argparse.Namespace, effort: Effort) -> dict[str, Any]:
    if not options.vllm_python:
        return {"skipped": "give --vllm-python"}
    servers = (ours(options.model, "fp32"), vllm(options.vllm_python, _hf_folder(options)))
    return _compare(servers, effort)


def _llama_cpp(options: argparse.Namespace, effort: Effort) -> dict[str, Any]:
    gguf = options.gguf or resolve_model(options.model)
    if not options.llama_server:
        return {"skipped": "give --llama-server"}
    if gguf.suffix != ".gguf":
        return {"skipped": f"{gguf} is not a GGUF file; give --gguf"}
    servers = (ours(options.model, "int4"), llama_cpp(options.llama_server, gguf, options.threads))
    return _compare(servers, effort)


def _compare(servers: tuple[Any, Any], effort: Effort) -> dict[str, Any]:
    """Ratios are ours / the other's."""
    count = max(8, 2 * effort.prompts)
    speeds = compare(servers, rounds=effort.rounds, num_prompts=count, output_len=effort.max_tokens)
    mine, other = (speeds[server.name] for server in servers)
    return {"tok_s": speeds, "ratio": {key: mine[key] / other[key] for key in mine}}


def _hf_folder(options: argparse.Namespace) -> Path:
    if options.hf_model:
        return Path(options.hf_model)
    if options.model in known_models():
        return fetch(options.model, "hf")
    path = resolve_model(options.model)
    if path.is_dir():
        return path
    raise RuntimeError(f"{path} is not a Hugging Face folder; give --hf-model")


_MEASURE = {
    "bound": _bound,
    "speculation": _speculation,
    "transformers": _transformers,
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
}


def targets(results: dict[str, Any]) -> list[Target]:
    """What the engine is meant to reach, with what this run found."""
    ratios = _transformers_ratios(results)
    llama = _at(results, "llama.cpp", "ratio", "c1")
    return [
        Target("fp32, 1 stream: share of the bound", 0.75, _at(results, "bound", "fp32", "share_1")),
        Target("fp32, 8 streams alike: share of the bound", 0.75, _at(results, "bound", "fp32", "share_8_alike")),
        Target("fp32, 8 mixed streams: share of the bound", 0.75, _at(results, "bound", "fp32", "share_8")),
        Target("fp32: verifying 5 tokens over 1", 1.45, _at(results, "bound", "fp32", "verify_ratio"), at_least=False),
        Target("fp32, 1 stream: times transformers", 1.5, ratios.get(1)),
        Target("fp32, 8 streams: times transformers", 1.5, ratios.get(8)),
        Target("fp32, 1 stream: times vLLM CPU", 1.5, _at(results, "vllm", "ratio", "c1")),
        Target("fp32, 8 streams: times vLLM CPU", 1.5, _at(results, "vllm", "ratio", "c8")),
        Target("n-gram on copy prompts, fp32, best k", 2.5, _best_gain(results, "ngram fp32")),
        Target("EAGLE-3 on chat, fp32, best k", 1.25, _best_gain(results, "eagle3 fp32")),
        Target(
            "4 bit, 1 stream: llama.cpp is at most this much faster", 1.5, 1 / llama if llama else None, at_least=False
        ),
    ]


def _at(results: dict[str, Any], *path: str) -> float | None:
    """A number deep in the results, None where the section was skipped."""
    value: Any = results
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if value is not None else None


def _best_gain(results: dict[str, Any], key: str) -> float | None:
    found = results.get("speculation", {}).get(key, {})
    return found["by_k"][found["best_k"]]["decoding"] if "by_k" in found else None


def _transformers_ratios(results: dict[str, Any]) -> dict[int, float]:
    found = results.get("transformers", {})
    if "tok_s" not in found:
        return {}
    names = {1: "plain, 1 stream, chat", 8: "plain, 8 streams, chat"}
    return {n: found["engine_tok_s"][str(n)] / found["tok_s"][name] for n, name in names.items()}


def show(results: dict[str, Any], console: Console) -> None:
    """The tables, targets last."""
    if results["quick"]:
        console.print("Quick: a look, not a result.")
    if results["load_at_start"] > BUSY_LOAD:
        console.print(f"Measured on a busy machine (load {results['load_at_start']:.1f} at the start).")
    _show_bound(results.get("bound", {}), console)
    _show_speculation(results.get("speculation", {}), console)
    others = Table("engine", "1 stream or way", "tok/s", title="Other engines on this machine")
    for name, speed in results.get("transformers", {}).get("tok_s", {}).items():
        others.add_row("transformers fp32", name, f"{speed:.1f}")
    for streams, speed in results.get("transformers", {}).get("engine_tok_s", {}).items():
        others.add_row("surespec fp32", f"plain, {streams} stream{'s' * (streams != '1')}, chat", f"{speed:.1f}")
    for section in ("vllm", "llama.cpp"):
        for name, speeds in results.get(section, {}).get("tok_s", {}).items():
            others.add_row(name, "1 stream, decoding", f"{speeds['c1']:.1f}")
            others.add_row(name, "8 streams, all time", f"{speeds['c8']:.1f}")
    if others.row_count:
        console.print(others)
    table = Table("target", "wanted", "got", "", title="Targets")
    for target in results["targets"]:
        sign = "≥" if target["at_least"] else "≤"
        got = "–" if target["got"] is None else f"{target['got']:.3f}"
        table.add_row(target["text"], f"{sign} {target['wanted']:.2f}", got, target["answer"])
    console.print(table)


def _show_bound(found: dict[str, Any], console: Console) -> None:
    if not found or "skipped" in found:
        return
    table = Table("precision", "streams", "bound tok/s", "engine tok/s", "share", title="Plain decoding and its bound")
    for precision, row in found.items():
        for name, words in (("1", "1"), ("8", "8, one of 447 tokens"), ("8_alike", "8 alike")):
            bound, speed = row[f"bound_tok_s_{name}"], row[f"engine_tok_s_{name}"]
            table.add_row(precision, words, f"{bound:.1f}", f"{speed:.1f}", f"{row[f'share_{name}']:.0%}")
        speeds = (f"{1e3 * PROMPT / row[f'{name}prompt_ms']:.1f}" for name in ("bound_", ""))
        table.add_row(precision, f"prompt of {PROMPT}", *speeds, f"{row['share_prompt']:.0%}")
    console.print(table)
    table = Table(
        "precision", "1 token ms", "5 tokens ms", "ratio", "bound's ratio", title="Cost of verifying 5 tokens"
    )
    for precision, row in found.items():
        times = (f"{row['step_ms_1']:.1f}", f"{row['step_ms_5']:.1f}")
        table.add_row(precision, *times, f"{row['verify_ratio']:.2f}", f"{row['bound_verify_ratio']:.2f}")
    console.print(table)


def _show_speculation(found: dict[str, Any], console: Console) -> None:
    if not found or "skipped" in found:
        return
    columns = ("drafter", "prompts", "k", "acceptance length", "decoding ×", "whole request ×", "same tokens")
    table = Table(*columns, title="Speculation over plain decoding, one stream")
    for key, entry in found.items():
        if "skipped" in entry:
            table.add_row(key, entry["skipped"], *[""] * 5)
            continue
        for k, row in entry["by_k"].items():
            mark = " *" if k == entry["best_k"] else ""
            numbers = (f"{row[name]:.2f}" for name in ("acceptance_length", "decoding", "whole"))
            table.add_row(key, entry["category"], f"{k}{mark}", *numbers, "yes" if entry["same_tokens"] else "no")
    console.print(table)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
