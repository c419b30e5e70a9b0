"""The command line: flags -> calls -> exit code, nothing else.

Results go to stdout, progress and messages to stderr. Everything heavy is imported inside the commands, so that
``surespec --help`` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from surespec import __version__
from surespec.cli_help import doctor_command, schema_command
from surespec.cli_plan import explain_command, plan_command, probe_command
from surespec.cli_recipe import apply_command, undo_command
from surespec.errors import SurespecError, UsageError, plain
from surespec.json_text import dumps_json

if TYPE_CHECKING:
    from surespec.core import BenchResult, Judgement

app = typer.Typer(
    rich_markup_mode=None,  # the boxes cost 0.15 s at every --help
    name="surespec",
    help="Makes speculative decoding pay, and proves it. The main job is `surespec tune`.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
PolicyFlag = Annotated[str, typer.Option(help="When to keep: jetson, any-gain, latency or throughput.")]
PrecisionFlag = Annotated[str, typer.Option(help="fp32 (exact), int8 or int4.")]
PromptsFlag = Annotated[str, typer.Option(help="A built-in prompt set, or a JSONL file of yours.")]
ConcurrencyFlag = Annotated[str, typer.Option(help="Requests in flight, comma-separated: 1,8.")]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"surespec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Holds the options of surespec itself."""


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m")],
    format_: Annotated[str, typer.Option("--format", help="gguf, or hf for a Hugging Face folder.")] = "gguf",
    as_json: JsonFlag = False,
) -> None:
    """Get the small default model and print its path."""
    from surespec.console import transfer_progress
    from surespec.fetch import fetch as fetch_model

    with transfer_progress() as progress:
        path = fetch_model(name, _one_of("--format", format_, ("gguf", "hf")), progress)
    _print_json({"schema": "surespec/fetch/1", "name": name, "path": str(path)}) if as_json else typer.echo(path)


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="smollm2-135m, a .gguf file, or a model folder.")] = "smollm2-135m",
    precision: PrecisionFlag = "fp32",
    speculative_config: Annotated[
        str | None, typer.Option(help='vLLM\'s JSON, e.g. \'{"method":"ngram","num_speculative_tokens":4}\'.')
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind; other than loopback, set --api-key too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest prompt + answer, in tokens.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, max=256, help="Sequences decoded together.")] = 16,
    kv_cache_tokens: Annotated[int | None, typer.Option(min=1, help="KV budget in tokens.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: the physical cores.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The name clients use.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SURESPEC_API_KEY", show_envvar=True, help="Asked of clients.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with that key: unlike --api-key not in the list of processes.")
    ] = None,
    dynamo: Annotated[
        bool, typer.Option("--dynamo", help="Be a worker of NVIDIA Dynamo instead; --host and --port are not used.")
    ] = False,
) -> None:
    """Serve a model on the embedded engine: OpenAI-compatible, or with --dynamo behind Dynamo's frontend."""
    from surespec.console import transfer_progress
    from surespec.fetch import resolve_model
    from surespec.local.server import ServeOptions
    from surespec.local.server import serve as run_server

    options = ServeOptions(
        model=model,
        served_model_name=served_model_name,
        precision=_one_of("--precision", precision, ("fp32", "int8", "int4")),
        speculative_config=speculative_config,
        host=host,
        port=port,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_tokens=kv_cache_tokens,
        threads=threads,
        api_key=_api_key(api_key, api_key_file),
    )
    if dynamo:
        from surespec.local.dynamo_worker import serve_dynamo

        serve_dynamo(options)
        return
    with transfer_progress() as progress:
        resolve_model(model, progress)
    run_server(options)


@app.command()
def bench(
    endpoint: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the one the server lists.")] = None,
    concurrency: ConcurrencyFlag = "1,8",
    prompts: PromptsFlag = "mixed",
    num_prompts: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Measured requests a concurrency; 36 if absent.")
    ] = None,
    input_len: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Pad prompts to about this many tokens.")
    ] = None,
    output_len: Annotated[int, typer.Option(min=1, help="Most tokens a request.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option(help="Sent with each request.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always produce --output-len tokens.")] = False,
    warmup: Annotated[bool, typer.Option(help="Send some requests first that do not count.")] = True,
    api: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds a request may take.")] = 600.0,
    format_: Annotated[str, typer.Option("--format", help="surespec, or jetson for the sibling skill's.")] = "surespec",
    as_json: JsonFlag = False,
) -> None:
    """Measure one running server: speed, latency and acceptance, per workload category."""
    from surespec.bench.interop import to_jetson
    from surespec.bench.runner import BenchOptions
    from surespec.bench.runner import bench as run_bench
    from surespec.console import bench_progress

    kind = _one_of("--format", format_, ("surespec", "jetson"))
    options = BenchOptions(
        endpoint=endpoint,
        model=model,
        concurrency=_numbers("--concurrency", concurrency),
        prompts=prompts,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        ignore_eos=ignore_eos,
        warmup=warmup,
        api=_one_of("--api", api, ("chat", "completions")),
        timeout_s=timeout,
    )
    with bench_progress() as progress:
        result = run_bench(options, progress)
    if kind == "jetson":
        _print_json(to_jetson(result))
    elif as_json:
        _print_json(result.document())
    else:
        _print_bench(result)
    _warn(result.warnings)


@app.command()
def judge(
    base: Annotated[Path, typer.Argument(help="Result file without speculation.")],
    cand: Annotated[Path, typer.Argument(help="Result file with speculation.")],
    policy: PolicyFlag = "jetson",
    as_json: JsonFlag = False,
) -> None:
    """Compare two result files (surespec, jetson-llm-benchmark, vllm bench serve, AIPerf, GuideLLM)."""
    from surespec.bench.interop import load_result
    from surespec.judge import judge_results
    from surespec.rules import policy as find_policy

    judgement = judge_results(load_result(base), load_result(cand), find_policy(policy), names=(str(base), str(cand)))
    _finish(judgement, "judge", as_json)


@app.command()
def tune(
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="The file that starts your deployment; it is read, and its command is launched for each arm."
        ),
    ] = None,
    service: Annotated[str | None, typer.Option(help="Which server, where the recipe starts several.")] = None,
    model: Annotated[
        str | None, typer.Option(help="smollm2-135m (without a recipe the default), a .gguf file, or a model folder.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="local (the default), vllm, llamacpp, sglang, trtllm, dynamo, dynamo-local (-sglang, -trtllm)."
        ),
    ] = None,
    engine_python: Annotated[
        str | None, typer.Option(help="Interpreter of the engine's environment; found if absent.")
    ] = None,
    engine_program: Annotated[str | None, typer.Option(help="The engine's program; found if absent.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=16, help="Context of the engine, in tokens.")] = None,
    managed: Annotated[
        bool, typer.Option("--managed", help="You start each arm at --endpoint; surespec says which.")
    ] = False,
    endpoint: Annotated[str | None, typer.Option(help="URL of the server you manage.")] = None,
    stop_existing: Annotated[
        bool, typer.Option("--stop-existing", help="Stop the server that runs already; it is started again at the end.")
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="With --stop-existing: on keep, leave the new setting running instead.")
    ] = False,
    precision: Annotated[str | None, typer.Option(help="fp32 (exact, the default), int8 or int4.")] = None,
    concurrency: ConcurrencyFlag = "1,8",
    policy: PolicyFlag = "jetson",
    prompts: PromptsFlag = "mixed",
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Measured requests a run; chosen if absent.")] = None,
    output_len: Annotated[int | None, typer.Option(min=2, help="Most tokens a request; chosen if absent.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    draft_model: Annotated[str | None, typer.Option(help="A small model of the same family to try as drafter.")] = None,
    eagle3_head: Annotated[str | None, typer.Option(help="An EAGLE-3 head to try; known for smollm2-135m.")] = None,
    budget: Annotated[str, typer.Option(help="Most time to spend: 90s, 20m, 1h.")] = "20m",
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds a request may take before the server hangs.")
    ] = 600.0,
    out: Annotated[Path, typer.Option(help="Folder for everything measured.")] = Path("surespec-run"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the folder given by --out.")] = False,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Dynamo: how many workers.")] = 1,
    router_mode: Annotated[str, typer.Option(help="Dynamo: round-robin, kv, random ...")] = "round-robin",
    discovery: Annotated[str, typer.Option(help="Dynamo: file (no service), or etcd with NATS.")] = "file",
    roll: Annotated[
        bool, typer.Option("--roll", help="Dynamo: keep serving; replace workers one at a time for each arm.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; launch nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """The main job: launch, measure before and after, decide, and write the exact command."""
    from surespec.console import tune_progress
    from surespec.report import write_report
    from surespec.tune import tune as run_tune
    from surespec.tune_plan import TuneOptions, plan_tune

    _no_twice(recipe, {"--model": model, "--engine": engine, "--precision": precision})
    engine = engine or "local"
    options = TuneOptions(
        model=model or "smollm2-135m",
        engine=engine,
        recipe=str(recipe.expanduser().absolute()) if recipe is not None else None,
        service=service,
        engine_python=engine_python,
        engine_program=engine_program,
        managed=managed,
        endpoint=endpoint,
        stop_existing=stop_existing,
        apply=apply,
        max_model_len=max_model_len,
        precision=_one_of(
            "--precision",
            precision or "fp32",
            ("fp32", "int8", "int4") if engine in ("local", "dynamo-local") else ("fp32", "bf16"),
        ),
        concurrency=_numbers("--concurrency", concurrency),
        policy=policy,
        prompts=prompts,
        num_prompts=num_prompts,
        output_len=output_len,
        temperature=temperature,
        draft_model=draft_model,
        eagle3_head=eagle3_head,
        budget_s=_duration("--budget", budget),
        timeout_s=timeout,
        out=out,
        resume=resume,
        workers=workers,
        router_mode=router_mode,
        discovery=discovery,
        roll=roll,
    )
    if dry_run:
        plan = plan_tune(options)
        _print_json(plan.document()) if as_json else typer.echo(plan.text())
        return
    with tune_progress() as progress:
        judgement = run_tune(options, progress)
    write_report(out)
    _finish(judgement, "tune", as_json)


@app.command()
def report(
    bundle: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that tune wrote.")],
    as_json: JsonFlag = False,
) -> None:
    """Write the report of a run again: HTML and CSV files, JSON on stdout with --json."""
    from surespec.report import write_report
    from surespec.store import Bundle

    page = write_report(bundle)
    if not as_json:
        typer.echo(page)
        return
    judgement = Bundle.open(bundle).judgement()
    if judgement is None:
        raise UsageError(f"{bundle} has no verdict yet.", hint=f"Finish it: surespec tune --resume --out {bundle}")
    _print_json(judgement.document("tune"))


@app.command()
def schedule(
    bundle: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that tune wrote.")],
    engine: Annotated[str, typer.Option(help="In whose words: vllm, local, trtllm or sglang.")] = "vllm",
    method: Annotated[str, typer.Option(help="Which drafter; by default the fastest at concurrency 1.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """A table batch size -> k from a run's measurements. Exit code 10: no batch size gains from drafting."""
    from surespec.scheduling import schedule_of

    found = schedule_of(bundle, engine, method)
    if as_json:
        _print_json(found.document())
    else:
        typer.echo(f"{found.arm.method}, from concurrency {', '.join(map(str, found.concurrencies))}:")
        for row in found.rows:
            typer.echo(f"  batch {row.low:>4} to {row.high:<5} k = {row.k}   {row.ratio:.2f} times the baseline")
        if found.drafts:
            typer.echo(json.dumps(found.setting(), separators=(",", ":")))
    _warn(found.notes)
    if not found.drafts:
        raise typer.Exit(10)


app.command("probe")(probe_command)
app.command("plan")(plan_command)
app.command("apply")(apply_command)
app.command("undo")(undo_command)
app.command("explain")(explain_command)
app.command("doctor")(doctor_command)
app.command("schema")(schema_command)


def main() -> NoReturn:
    """Run the command line; every expected error ends as one or two sentences and its documented exit code."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be UTF-8
    try:
        try:
            # Without standalone mode the library returns the code of a typer.Exit instead of raising it.
            code = app(standalone_mode=False) or 0
            if code == 128 + signal.SIGINT:  # the library's own answer to Ctrl-C
                raise KeyboardInterrupt
            sys.stdout.flush()
        finally:  # what is left to do is short, and a second Ctrl-C must not end it half-way
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except SurespecError as exc:
        _say_error(str(exc))
        code = exc.exit_code
    except KeyboardInterrupt:
        _say_error("Interrupted.")
        code = 1
    except BrokenPipeError:
        _drop_stdout()
        code = 1
    except Exception as exc:
        code = _report_other(exc)
    sys.exit(code)


def _report_other(exc: Exception) -> int:
    """Usage errors of the command-line library, and what nobody foresaw: one sentence each, never a traceback."""
    show = getattr(exc, "show", None)
    if callable(show) and hasattr(exc, "exit_code"):
        if isinstance(said := getattr(exc, "message", None), str):
            exc.message = "\n".join(map(plain, said.split("\n")))  # type: ignore[attr-defined]
        show()
        return int(exc.exit_code)
    if type(exc).__name__ == "Abort":
        _say_error("Interrupted.")
        return 1
    if isinstance(exc, OSError) and exc.filename is None and exc.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
        _drop_stdout()
        _say_error(f"The output cannot be written: {exc.strerror}.", "Free some room, or send it elsewhere.")
        return 1
    _say_error(
        f"surespec itself failed: {type(exc).__name__}: {exc}.",
        "This is a bug in surespec; with SURESPEC_DEBUG=1 it shows where.",
    )
    if os.environ.get("SURESPEC_DEBUG"):
        import traceback

        traceback.print_exception(exc)
    return 1


def _drop_stdout() -> None:
    """What is left in the buffer goes nowhere, so that the interpreter does not fail on it again at its end."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _as_interrupt(_signum: int, _frame: object) -> NoReturn:
    """SIGTERM ends a command as Ctrl-C does, so that servers are stopped and bundles closed."""
    raise KeyboardInterrupt


def _finish(judgement: Judgement, noun: Any, as_json: bool) -> NoReturn:
    """Print a verdict and leave with its exit code."""
    if as_json:
        _print_json(judgement.document(noun))
    else:
        from surespec.console import stdout_console
        from surespec.report import print_terminal

        print_terminal(judgement, stdout_console())
    raise typer.Exit(judgement.exit_code)


def _print_bench(result: BenchResult) -> None:
    from surespec.console import bench_table, stdout_console

    stdout_console().print(bench_table(result))


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(dumps_json(document))


def _warn(warnings: tuple[str, ...]) -> None:
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)


def _say_error(message: str, hint: str = "") -> None:
    from surespec.engines.log_tail import redact

    typer.echo(redact(f"surespec: {message} {hint}".rstrip()), err=True)


def _api_key(given: str | None, file: Path | None) -> str | None:
    """The key that ``serve`` asks for. A key on the command line can be read by every user of the machine."""
    if file is None:
        if given and os.environ.get("SURESPEC_API_KEY") != given:
            _warn(("--api-key stands in the list of processes; --api-key-file or SURESPEC_API_KEY does not.",))
        return given
    from surespec.input_files import read_input

    hint = "Write the key into it, and nothing else."
    key = read_input(file, what="an API key", most_bytes=4096, hint=hint).decode("utf-8", "replace").strip()
    if not key or any(not 33 <= ord(letter) <= 126 for letter in key):
        raise UsageError(f"--api-key-file {file}: not one key of visible ASCII characters.", hint=hint)
    return key


def _no_twice(recipe: Path | None, given: dict[str, str | None]) -> None:
    """With a recipe, what it says is not said again."""
    for flag, value in given.items():
        if recipe is not None and value is not None:
            raise UsageError(f"{flag} {value}: with --recipe, the recipe says it.", hint="Leave it out.")


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> Any:
    """The value if it is allowed, else a UsageError with the allowed ones."""
    if value not in allowed:
        raise UsageError(f"{flag} {value}: there is no such choice.", hint=f"Choose {' or '.join(allowed)}.")
    return value


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    """Ascending, distinct concurrencies of a text such as ``1,8``."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1 or numbers[-1] > 1024:
        raise UsageError(f"{flag} {text}: not a list of whole numbers from 1 to 1024.", hint=f"Write {flag} 1,8.")
    return tuple(numbers)


def _duration(flag: str, text: str) -> float:
    """Seconds of ``90s``, ``20m`` or ``1h`` (a bare number means seconds)."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    body, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        seconds = float(body) * unit
    except ValueError:
        seconds = -1.0
    if not 1.0 <= seconds <= 7 * 24 * 3600:
        raise UsageError(f"{flag} {text}: not a duration between 1 second and a week.", hint=f"Write {flag} 20m.")
    return seconds
