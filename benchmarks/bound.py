"""The bound: how long a step would take if it were nothing but its weight products.

One ONNX graph with the model's own matrices chained in the order of a forward pass, without attention, norms, cache or
Python. fp32 as plain constant MatMuls, 8 and 4 bit as MatMulNBits. No engine on this runtime can be faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from surespec.local.graph import CONTRIB, GraphBuilder
from surespec.local.quantize import BLOCK, quantize_blocks
from surespec.local.types import FloatArray
from surespec.local.weights import ModelFiles


class BareProducts:
    """The weight products of one model in one precision; ``step_ms`` times them for n tokens."""

    def __init__(self, files: ModelFiles, precision: str, threads: int) -> None:
        self.hidden = files.config.hidden_size
        self._session = _chain(files, precision).session(threads)

    def step(self, tokens: int) -> None:
        """All products once for ``tokens`` rows, logits of each: a decoding or verifying step."""
        self._run(tokens, np.arange(tokens))

    def prompt(self, tokens: int) -> None:
        """The products of reading a prompt: logits of the last row only."""
        self._run(tokens, np.array([tokens - 1]))

    def _run(self, tokens: int, rows: NDArray[np.int64]) -> None:
        self._session.run(["logits"], {"x": np.ones((tokens, self.hidden), np.float32), "logit_rows": rows})

    def step_ms(self, tokens: int, repeats: int) -> float:
        """Median milliseconds of one step."""
        return in_turns_ms({tokens: partial(self.step, tokens)}, repeats)[tokens]


def in_turns_ms(calls: Mapping[int, Callable[[], object]], repeats: int) -> dict[int, float]:
    """Median wall time in milliseconds of each call, made in turns (A B A B); the first two turns do not count."""
    times: dict[int, list[float]] = {key: [] for key in calls}
    for i in range(repeats + 2):
        for key, call in calls.items():
            begin = time.perf_counter()
            call()
            if i >= 2:
                times[key].append(1e3 * (time.perf_counter() - begin))
    return {key: median(values) for key, values in times.items()}


def _chain(files: ModelFiles, precision: str) -> GraphBuilder:
    """x (n, hidden) -> logits (n, vocab). A slice makes the widths meet where attention and activation would."""
    config, tensors = files.config, files.tensors
    attended = config.num_heads * config.head_dim
    graph = GraphBuilder()
    graph.input("x", ["n", config.hidden_size])
    graph.input("logit_rows", ["rows"], TensorProto.INT64)
    x = "x"
    for layer in range(config.num_layers):
        at, name = f"model.layers.{layer}.", f"b{layer}"
        qkv = np.concatenate([tensors[f"{at}self_attn.{part}_proj.weight"] for part in "qkv"])
        x = _product(graph, x, f"{name}.qkv", qkv, precision)
        x = _first_columns(graph, x, attended)
        x = _product(graph, x, f"{name}.o", tensors[f"{at}self_attn.o_proj.weight"], precision)
        gate_up = np.concatenate([tensors[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up")])
        x = _product(graph, x, f"{name}.gu", gate_up, precision)
        x = _first_columns(graph, x, config.intermediate_size)
        x = _product(graph, x, f"{name}.down", tensors[f"{at}mlp.down_proj.weight"], precision)
    head = tensors["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    wanted = graph.node("Gather", [x, "logit_rows"], "wanted", axis=0)
    _product(graph, wanted, "logits", head, precision)
    graph.output("logits", ["n", config.vocab_size])
    return graph


def _product(graph: GraphBuilder, x: str, name: str, weight: FloatArray, precision: str) -> str:
    """``x @ weight.T`` for ``weight`` (out, in)."""
    if precision == "fp32":
        return graph.node("MatMul", [x, graph.constant(f"{name}.w", weight.T)], name)
    bits = {"int8": 8, "int4": 4}[precision]
    codes, scales = quantize_blocks(weight, bits)
    inputs = [x, graph.constant(f"{name}.q", codes), graph.constant(f"{name}.s", scales)]
    rows, columns = weight.shape
    attributes = {"K": columns, "N": rows, "bits": bits, "block_size": BLOCK, "accuracy_level": 4}
    return graph.node("MatMulNBits", inputs, name, domain=CONTRIB, **attributes)


def _first_columns(graph: GraphBuilder, x: str, width: int) -> str:
    inputs = [x, graph.integers(0), graph.integers(width), graph.integers(1)]
    return graph.node("Slice", inputs, f"{x}.cut")


__all__ = ["BareProducts", "in_turns_ms"]
