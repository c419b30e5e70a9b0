"""The commands ``probe``, ``plan`` and ``explain``: flags -> calls -> output and exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surespec.errors import SurespecError, UsageError
from surespec.json_text import dumps_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from surespec.plan_nouns import Device, Model, Plan, PlannedArm
    from surespec.probe import Endpoint, Probe
    from surespec.recipe import Recipe

MOST = 100_000_000  # tokens, sequences: beyond any engine

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
DeviceFlag = Annotated[str, typer.Option("--device", help="Simulate a device of the table, e.g. thor-t5000.")]
L4tFlag = Annotated[str, typer.Option("--l4t", help="L4T release of the Jetson, e.g. 36.4.3 or 39.2.")]
RootFlag = Annotated[Path | None, typer.Option("--root", help="Read a captured file system instead of this machine.")]
OfflineFlag = Annotated[bool, typer.Option("--offline", help="Do not ask Hugging Face; bundled and cached facts only.")]


def probe_command(
    device: DeviceFlag = "",
    l4t: L4tFlag = "",
    root: RootFlag = None,
    model: Annotated[str, typer.Option("--model", help="A folder, a .gguf file or a Hugging Face id.")] = "",
    endpoint: Annotated[str, typer.Option("--endpoint", help="URL of a running server.")] = "",
    recipe: Annotated[Path | None, typer.Option("--recipe", help="The text that starts the deployment.")] = None,
    offline: OfflineFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """What is here: device, engines, model, running server."""
    from surespec.probe import probe
    from surespec.recipe import read_recipe

    read = read_recipe(recipe) if recipe else None
    found = probe(
        device=device,
        l4t=l4t,
        root=root,
        model=model or (read.model if read else ""),
        endpoint=endpoint,
        offline=offline,
    )
    if as_json:
        _print_json({**found.document(), **({"recipe": read.document()} if read else {})})
        return
    _print_probe(found)
    if read is not None:
        print(f"recipe     {read.path.name}: {_recipe_line(read)}")
        for diagnosis in read.diagnoses:
            print(f"- {diagnosis}")


def plan_command(
    model: Annotated[str, typer.Option("--model", help="A folder, a .gguf file or a Hugging Face id.")] = "",
    device: DeviceFlag = "",
    l4t: L4tFlag = "",
    root: RootFlag = None,
    engine: Annotated[
        str,
        typer.Option("--engine", help="vllm, sglang, trtllm, llamacpp, dynamo, dynamo-sglang, dynamo-trtllm, local."),
    ] = "",
    engine_version: Annotated[str, typer.Option("--engine-version", help="The engine's version, e.g. 0.31.0.")] = "",
    image: Annotated[str, typer.Option("--image", help="The container image the deployment uses.")] = "",
    endpoint: Annotated[
        str, typer.Option("--endpoint", help="Take engine, version and model from a running server.")
    ] = "",
    recipe: Annotated[Path | None, typer.Option("--recipe", help="The text that starts the deployment.")] = None,
    drafter: Annotated[
        str, typer.Option("--drafter", help="Plan with this head or draft: a folder or a Hugging Face id.")
    ] = "",
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Concurrencies that matter, e.g. 1 or 1,8.")
    ] = "1,8",
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", min=16, max=MOST, help="Context length.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", min=1, max=MOST, help="Most sequences at once.")
    ] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option("--max-num-batched-tokens", min=1, max=MOST)] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option("--gpu-memory-utilization", min=0.05, max=1.0, help="The baseline's value.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option("--kv-cache-dtype", help="auto or fp8.")] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", min=1, max=1024)] = 1,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Dynamo: a DynamoGraphDeployment.")] = False,
    host: Annotated[str, typer.Option("--host", help="Address the commands bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    offline: OfflineFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Ranked arms, refusals by rule, memory, and the exact command of each. Nothing is launched."""
    from surespec.plan_nouns import PlanOptions
    from surespec.planning import PlanRequest, make_plan
    from surespec.recipe import read_recipe

    options = PlanOptions(
        concurrency=parse_concurrency(concurrency),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel=tensor_parallel_size,
        host=host,
        port=port,
        kubernetes=kubernetes,
    )
    read = read_recipe(recipe) if recipe else None
    request = PlanRequest(
        model=model,
        device=device,
        l4t=l4t,
        root=root,
        engine=engine,
        engine_version=engine_version,
        image=image,
        endpoint=endpoint,
        recipe=read,
        drafter=drafter,
        offline=offline,
        options=options,
    )
    result = make_plan(request)
    if as_json:
        _print_json({**result.document(), **({"recipe": read.document()} if read else {})})
    else:
        if read is not None:
            print(f"recipe {read.path.name}: {_recipe_line(read)}")
            for diagnosis in read.diagnoses:
                print(f"- {diagnosis}")
            if not (device or root) and (missing := _missing_here(read)):
                print(f"- {missing}: it cannot be started on this machine; for another one give --device.")
        _print_plan(result)
        if read is not None:
            print("These commands serve the model afresh; surespec apply changes the recipe itself and keeps the rest.")
    raise typer.Exit(result.exit_code)


def explain_command(
    rule: Annotated[str, typer.Argument(help="A rule's name, e.g. C5; without it all are listed.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """A rule, why, and its source."""
    from dataclasses import asdict

    from surespec.rules import explain, rules

    if not rule:
        entries = list(rules().values())
        if as_json:
            _print_json({"schema": "surespec/rules/1", "rules": [asdict(entry) for entry in entries]})
        else:
            for entry in entries:
                print(f"{entry.name:4} {entry.rule}")
        return
    entry = explain(rule)
    if as_json:
        _print_json({"schema": "surespec/rule/1", **asdict(entry)})
        return
    print(f"{entry.name}: {entry.rule}\n  why:    {entry.why}\n  source: {entry.source}")
    if entry.contradiction:
        print(f"  but:    {entry.contradiction}")


def parse_concurrency(text: str) -> tuple[int, ...]:
    """``1,8`` -> (1, 8). Raises UsageError."""
    try:
        values = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise UsageError(
            f"--concurrency {text}: whole numbers separated by commas.", hint="For example 1,8."
        ) from error
    if not all(1 <= value <= 4096 for value in values):
        raise UsageError(f"--concurrency {text}: each must be between 1 and 4096.")
    return values


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(dumps_json(document))
    sys.stdout.write("\n")


def _print_probe(found: Probe) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(_device_line(found.device))}[/bold]")
    for name, version in found.engines.items():
        console.print(f"  {name:9} {escape(version)}")
    if found.model is not None:
        console.print(f"model      {escape(_model_line(found.model))}")
    if found.endpoint is not None:
        console.print(f"endpoint   {escape(_endpoint_line(found.endpoint))}")
    for note in found.notes:
        console.print(f"- {escape(note)}")


def _missing_here(read: Recipe) -> str:
    """What the recipe's command needs and this machine has not; empty where that cannot be told."""
    from surespec.engines.from_recipe import recipe_engine

    try:
        return recipe_engine(read).missing()
    except SurespecError:
        return ""


def _recipe_line(read: Recipe) -> str:
    parts = [read.kind, f"{read.engine} {read.engine_version}".strip(), read.image, read.model]
    parts += [f"utilization {read.gpu_memory_utilization:.2f}"] if read.gpu_memory_utilization is not None else []
    parts.append("speculating" if read.speculates else "not speculating")
    return ", ".join(part for part in parts if part)


def _device_line(device: Device) -> str:
    from surespec.plan_nouns import GIB

    parts = [device.name, f"{device.memory_bytes / GIB:.1f} GiB"]
    if device.available_bytes is not None:
        parts.append(f"{device.available_bytes / GIB:.1f} GiB free")
    parts += [f"{device.gpus} GPUs"] if device.gpus > 1 else []
    parts += [f"compute {device.compute_capability}"] if device.compute_capability else []
    parts += [f"L4T {device.l4t} (JetPack {device.jetpack or 'unknown'})"] if device.l4t else []
    parts += [f"power mode {device.power_mode}"] if device.power_mode else []
    return ", ".join(parts) + (" [simulated]" if device.simulated else "")


def _model_line(model: Model) -> str:
    from surespec.memory import kv_bytes_per_token
    from surespec.plan_nouns import GIB

    size = f"{model.weight_bytes / GIB:.2f} GiB ({model.weight_source})"
    return f"{model.id}: {model.quantization}, {size}, {kv_bytes_per_token(model)} KV bytes a token"


def _endpoint_line(endpoint: Endpoint) -> str:
    speculating = {True: "speculating", False: "not speculating", None: "speculation unknown"}[endpoint.speculating]
    engine = f"{endpoint.engine or 'unknown engine'} {endpoint.version}".strip()
    return f"{endpoint.url}: {engine}, {endpoint.model}, {speculating}"


def _print_plan(result: Plan) -> None:
    from rich.console import Console
    from rich.markup import escape

    wide = Console(highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        wide.print(escape(line))

    wide.print(f"[bold]{escape(_device_line(result.device))}[/bold]")
    say(_model_line(result.model))
    if result.arms:
        Console(highlight=False).print(_arm_table(result.arms))
    many = len(result.arms) > 1
    shared = [n for n in result.arms[0].notes if all(n in a.notes for a in result.arms)] if many else []
    for arm in result.arms:
        drafter = f" with {arm.drafter.id}" if arm.drafter and arm.drafter.id else ""
        wide.print(f"[bold]{escape(arm.name)}[/bold]{escape(drafter)} ({', '.join(arm.rules)})")
        say(arm.command)
        for change in arm.changes:
            say(f"  to fit: {change.flag} {change.value} ({change.rule}: {change.why})")
        for note in arm.notes:
            if note not in shared:
                say(f"  - {note}")
    if result.arms and result.arms[0].files:
        for name, text in result.arms[0].files.items():
            say(f"{name} of {result.arms[0].name} (those of the others: --json, arms[].files):")
            print(text, end="" if text.endswith("\n") else "\n")
    for refusal in result.refused:
        wide.print(f"[bold]refused[/bold] {escape(refusal.method)} by {refusal.rule}: {escape(refusal.why)}")
        for instead in refusal.instead:
            say(f"  instead: {instead}")
    for note in [*shared, *result.notes]:
        say(f"- {note}")
    if result.guide:
        wide.print("[bold]Quick start[/bold]")
    for number, step in enumerate(result.guide, 1):
        say(f"{number}. {step.title}")
        say("".join(f"   {line}\n" for line in step.text.rstrip().splitlines()).rstrip())
        if step.why:
            say(f"   ({step.why})")
    if result.exit_code and result.arms:
        say('No arm fits as asked: make the changes under "to fit" and plan again, or serve without speculation.')
    elif result.exit_code:
        say("No arm is worth a try here: keep the deployment as it is.")


def _arm_table(arms: Sequence[PlannedArm]) -> Table:
    """Name, utilization, fit and break-even of each arm; narrow enough for 80 columns."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Arms, best first", title_justify="left")
    table.add_column("arm")
    for column in ("util", "fits", "margin GiB", "break-even"):
        table.add_column(column, justify="right", no_wrap=True)
    for arm in arms:
        util = "" if arm.gpu_memory_utilization is None else f"{arm.gpu_memory_utilization:.2f}"
        even = "" if arm.break_even_length is None else f"{arm.break_even_length:.2f}"
        table.add_row(escape(arm.name), util, "yes" if arm.fits else "no", f"{arm.margin_gib:.2f}", even)
    table.caption = "break-even: tokens a step must yield to lose nothing (an estimate)"
    return table


__all__ = ["explain_command", "parse_concurrency", "plan_command", "probe_command"]
