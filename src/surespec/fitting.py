"""When a launch does not fit: the least that has to change. Pure; ``memory.budget`` decides what fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from surespec.memory import Settings, budget, highest_utilization
from surespec.plan_nouns import GIB, Change, Device, Model


@dataclass(frozen=True)
class _Step:
    change: Change
    apply: Settings


_Knob = Callable[[Device, Settings], Iterator[_Step]]


def smallest_changes(device: Device, s: Settings, variants: Sequence[Model] = ()) -> tuple[Change, ...] | None:
    """The fewest changes that make ``s`` fit, mildest first; None when nothing does.

    One or two settings come before another checkpoint, another checkpoint (with one more setting) before three.
    Tried: fp8 KV where the device has fp8, a shorter context, fewer sequences, another utilization (never above 0.90
    nor above what is available), and a smaller checkpoint of the same model among ``variants``.
    """

    def model_knob(_: Device, state: Settings) -> Iterator[_Step]:
        return _smaller_checkpoints(state, variants)

    knobs: list[_Knob] = [_kv_knob, _context_knob, _seqs_knob, _utilization_knob]
    one, two, three = (list(itertools.combinations(knobs, size)) for size in (1, 2, 3))
    other = [(model_knob,), *((model_knob, *subset) for subset in one)]
    for subset in (*one, *two, *other, *three):
        found = _first_fit(device, s, subset)
        if found is not None:
            return found
    return None


def _first_fit(device: Device, s: Settings, subset: Sequence[_Knob]) -> tuple[Change, ...] | None:
    """The mildest values of these knobs that fit together, or None."""
    states: list[tuple[tuple[Change, ...], Settings]] = [((), s)]
    for knob in subset:
        grown: list[tuple[tuple[Change, ...], Settings]] = []
        for changes, state in states:
            grown.extend(((*changes, step.change), step.apply) for step in knob(device, state))
        states = grown
    return next((changes for changes, state in states if budget(device, state).fits), None)


def _kv_knob(device: Device, s: Settings) -> Iterator[_Step]:
    if device.fp8 and s.kv_dtype in ("auto", "bfloat16") and s.utilization is not None:
        yield _Step(
            Change(flag="--kv-cache-dtype", value="fp8", why="halves the KV cache", rule="G5"),
            replace(s, kv_dtype="fp8"),
        )


def _context_knob(device: Device, s: Settings) -> Iterator[_Step]:
    length = s.max_model_len // 2
    while length >= 2048:
        yield _Step(
            Change(
                flag="--max-model-len",
                value=str(length),
                why="a shorter context needs less KV for one request",
                rule="M3",
            ),
            replace(s, max_model_len=length),
        )
        length //= 2


def _seqs_knob(device: Device, s: Settings) -> Iterator[_Step]:
    fewer = max(1, s.concurrency)
    if s.max_num_seqs > fewer:
        yield _Step(
            Change(
                flag="--max-num-seqs",
                value=str(fewer),
                why="fewer sequences need less room for logits and graphs",
                rule="M3",
            ),
            replace(s, max_num_seqs=fewer),
        )


def _utilization_knob(device: Device, s: Settings) -> Iterator[_Step]:
    if s.utilization is None:
        return
    highest = highest_utilization(device)
    if s.utilization > highest > 0:
        why = "the available memory must cover what the engine asks for; or free memory on the host first"
        yield _Step(
            Change(flag="--gpu-memory-utilization", value=f"{highest:.2f}", why=why, rule="M4"),
            replace(s, utilization=highest),
        )
        return
    step = math.floor(s.utilization * 100) + 1
    while step / 100 <= highest + 1e-9:
        yield _Step(
            Change(
                flag="--gpu-memory-utilization",
                value=f"{step / 100:.2f}",
                why="weights, drafter and KV share one budget; the memory is available",
                rule="M1",
            ),
            replace(s, utilization=step / 100),
        )
        step += 1


def _smaller_checkpoints(s: Settings, variants: Sequence[Model]) -> Iterator[_Step]:
    smaller = sorted((v for v in variants if v.weight_bytes < s.model.weight_bytes), key=lambda v: -v.weight_bytes)
    for variant in smaller:
        size = variant.weight_bytes / GIB
        yield _Step(
            Change(
                flag="model", value=variant.id, why=f"{variant.quantization} weights, about {size:.1f} GiB", rule="M6"
            ),
            replace(s, model=variant),
        )
