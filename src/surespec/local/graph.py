"""ONNX graphs built from weights at load, and the ONNX Runtime session that runs them.

The graph works on the flattened tokens of all sequences, (n, hidden), where the dense products are; only attention sees
sequences, as B rows of w query places. ``w`` is the longest chunk; shorter ones repeat their last token, and what comes
out at those places is not read. Keys and values go into the cache *inside* the graph: ``ScatterND`` has the cache as
its input and, bound to the same memory, as its output, so ONNX Runtime copies nothing and writes only the new rows.
Attention then runs over the cache with a mask. Two things follow: nothing has to be written back after a step, and a
token's arithmetic is the same whether its predecessors came in this step or an earlier one. With products that do not
depend on the number of rows either, verifying k + 1 tokens gives the bits that k + 1 single steps give.

Weights do not travel inside the protobuf (its limit is 2 GB): the graph names them as external data and the session
gets the arrays. ONNX Runtime packs constant matrices into its own layout once, so the arrays can go afterwards.
"""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil
from numpy.typing import NDArray
from onnx import TensorProto, helper

from surespec.local.quantize import BLOCK, quantize_blocks
from surespec.local.types import FloatArray, ModelConfig
from surespec.local.weights import llama3_frequency_scale

CONTRIB = "com.microsoft"
OPSET = 21
IR_VERSION = 10
PRECISIONS = {"fp32": 0, "int8": 8, "int4": 4}
INLINE_BYTES = 1024  # constants up to this size stay in the protobuf
SPIN_US = 50  # measured: 30 to 300 us are alike alone, and far better than none or endless spinning


def default_threads() -> int:
    """One thread a physical core: the products are bound by memory and vector units, which hyper-threads share."""
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def rope_tables(config: ModelConfig, length: int) -> tuple[FloatArray, FloatArray]:
    """(cos, sin), each (length, head_dim / 2), of the rotary angles, with Llama-3's scaling where configured."""
    inverse = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if config.rope_scaling:
        inverse = inverse * llama3_frequency_scale(inverse, config.rope_scaling)
    angles = np.outer(np.arange(length, dtype=np.float64), inverse)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Head counts, head size, and how many values enter q, k and v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def groups(self) -> int:
        """Query heads a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Rows of head_dim a token has after the joint q, k, v product."""
        return self.num_heads + 2 * self.num_kv_heads


class GraphBuilder:
    """Collects nodes, inputs, outputs and constants; ``session`` turns them into a running model."""

    def __init__(self, precision: str = "fp32") -> None:
        self.bits = PRECISIONS[precision]
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._inline: list[TensorProto] = []
        self._external: dict[str, NDArray[Any]] = {}
        self._names: set[str] = set()

    def input(self, name: str, shape: list[int | str], kind: int = TensorProto.FLOAT) -> str:
        """Declare a graph input."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, shape: list[int | str], kind: int = TensorProto.FLOAT) -> None:
        """Declare ``name`` as a graph output."""
        self._outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def node(
        self, op: str, inputs: list[str], name: str, *, domain: str = "", extra: int = 0, **attributes: Any
    ) -> str:
        """Add a node with output ``name`` (and ``extra`` more: ``name.1`` ...); returns ``name``."""
        outputs = [name, *(f"{name}.{i + 1}" for i in range(extra))]
        self._nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **attributes))
        return name

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """A constant; adding the same name again is free."""
        if name in self._names:
            return name
        self._names.add(name)
        value = np.ascontiguousarray(value)
        if value.nbytes <= INLINE_BYTES:
            self._inline.append(onnx.numpy_helper.from_array(value, name))
        else:
            self._external[name] = value
        return name

    def integers(self, *values: int) -> str:
        """A small int64 vector, named after its values."""
        return self.constant("i" + "_".join(map(str, values)), np.array(values, np.int64))

    def linear(self, x: str, name: str, weight: FloatArray, bias: FloatArray | None = None) -> str:
        """``x @ weight.T + bias`` for ``weight`` (out, in), in the builder's precision."""
        rows, columns = weight.shape
        if not self.bits:
            inputs = [x, self.constant(f"{name}.w", weight)]
            if bias is not None:
                inputs.append(self.constant(f"{name}.b", bias))
            return self.node("Gemm", inputs, name, transB=1)
        packed, scales = quantize_blocks(weight, self.bits)
        inputs = [x, self.constant(f"{name}.q", packed), self.constant(f"{name}.s", scales)]
        attributes = {"K": columns, "N": rows, "bits": self.bits, "block_size": BLOCK, "accuracy_level": 4}
        y = self.node("MatMulNBits", inputs, f"{name}.y" if bias is not None else name, domain=CONTRIB, **attributes)
        return y if bias is None else self.node("Add", [y, self.constant(f"{name}.b", bias)], name)

    def rms_norm(self, x: str, name: str, weight: FloatArray, eps: float) -> str:
        """RMSNorm over the last axis."""
        scale = self.constant(f"{name}.w", weight)
        return self.node("SimplifiedLayerNormalization", [x, scale], name, axis=-1, epsilon=eps)

    def add_rms_norm(self, x: str, residual: str, name: str, weight: FloatArray, eps: float) -> tuple[str, str]:
        """(RMSNorm(x + residual), x + residual)."""
        scale = self.constant(f"{name}.w", weight)
        total = f"{name}.sum"
        outputs = [name, "", "", total]
        op = "SkipSimplifiedLayerNormalization"
        self._nodes.append(helper.make_node(op, [residual, x, scale], outputs, domain=CONTRIB, epsilon=eps))
        return name, total

    def attention_inputs(self, shape: AttentionShape, cos: FloatArray, sin: FloatArray) -> None:
        """Declare what every layer's attention shares; ``batch.Batch`` computes the values."""
        self.input("positions", [1, "n"], TensorProto.INT64)
        self.input("q_rows", ["B", shape.num_kv_heads, "gw"], TensorProto.INT64)
        self.input("k_rows", ["n", shape.num_kv_heads], TensorProto.INT64)
        self.input("v_rows", ["n", shape.num_kv_heads], TensorProto.INT64)
        self.input("out_rows", ["asking", shape.num_heads], TensorProto.INT64)
        self.input("places", ["n", shape.num_kv_heads, 3], TensorProto.INT64)
        self.input("mask", ["B", 1, "gw", "T"])
        self.constant("cos", cos)
        self.constant("sin", sin)

    def attention(self, qkv: str, layer: int, shape: AttentionShape, qk_norm: tuple[FloatArray, float] | None) -> str:
        """Causal attention of one layer over its cache; ``qkv`` (n, rows * head_dim) -> (n, heads * head_dim).

        Only the rows of tokens that ask a query come out (all of them, unless the batch says ``last_only``).

        ``qk_norm``: (weights (rows, head_dim), eps) for Qwen3's norm over each head before the rotation; the rows of v
        are normalised too, in vain, which is cheaper than taking them apart.
        """
        at, dim = f"l{layer}.", shape.head_dim
        flat = self.node("Reshape", [qkv, self.integers(-1, dim)], at + "rows")
        to_rotate = qkv
        if qk_norm is not None:
            weights, eps = qk_norm
            normed = self.rms_norm(flat, at + "qkn", np.ones(dim, np.float32), eps)
            heads = self.node("Reshape", [normed, self.integers(-1, shape.rows, dim)], at + "qkh")
            to_rotate = self.node("Mul", [heads, self.constant(at + "qkw", weights)], at + "qks")
        one_batch = self.node("Reshape", [to_rotate, self.integers(1, -1, shape.rows * dim)], at + "flat")
        rotated = self.node("RotaryEmbedding", [one_batch, "positions", "cos", "sin"], at + "rope", domain=CONTRIB)
        turned = self.node("Reshape", [rotated, self.integers(-1, dim)], at + "turned")
        q = self.node("Gather", [turned, "q_rows"], at + "q", axis=0)
        new_k = self.node("Gather", [turned, "k_rows"], at + "k", axis=0)
        new_v = self.node("Gather", [flat, "v_rows"], at + "v", axis=0)
        cache_shape: list[int | str] = ["B", shape.num_kv_heads, "T", dim]
        for part in "kv":
            self.input(f"{part}{layer}", cache_shape)
            self.output(f"{part}{layer}.new", cache_shape)
        keys = self.node("ScatterND", [f"k{layer}", "places", new_k], f"k{layer}.new")
        values = self.node("ScatterND", [f"v{layer}", "places", new_v], f"v{layer}.new")
        scale = 1.0 / math.sqrt(dim)
        scores = self.node("FusedMatMul", [q, keys], at + "scores", domain=CONTRIB, transB=1, alpha=scale)
        masked = self.node("Add", [scores, "mask"], at + "masked")
        weights_ = self.node("Softmax", [masked], at + "softmax", axis=-1)
        mixed = self.node("MatMul", [weights_, values], at + "mixed")
        places = self.node("Reshape", [mixed, self.integers(-1, dim)], at + "places")
        picked = self.node("Gather", [places, "out_rows"], at + "picked", axis=0)
        return self.node("Reshape", [picked, self.integers(-1, shape.num_heads * dim)], at + "attended")

    def mlp(self, x: str, name: str, gate_up: FloatArray, down: FloatArray) -> str:
        """``down(silu(gate(x)) * up(x))``; ``gate_up`` is gate above up, (2 * inter, hidden)."""
        both = self.linear(x, f"{name}.gu", gate_up)
        self.node("Split", [both], f"{name}.g", extra=1, axis=1, num_outputs=2)
        active = self.node("QuickGelu", [f"{name}.g"], f"{name}.silu", domain=CONTRIB, alpha=1.0)
        product = self.node("Mul", [active, f"{name}.g.1"], f"{name}.mul")
        return self.linear(product, f"{name}.down", down)

    def session(self, threads: int) -> ort.InferenceSession:
        """Build the session. The builder's arrays are let go; ONNX Runtime keeps its packed copies."""
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        # Threads that spin for long steal the cores from the other session (target and drafter alternate) and from
        # everybody else on a busy machine; asleep between products they wake too late. So: spin briefly, and stop
        # when a run ends (the second setting bounds it where ONNX Runtime is too old to know the first).
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
        options.add_session_config_entry("session.force_spinning_stop", "1")
        names, arrays = list(self._external), list(self._external.values())
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in arrays]
        if names:
            options.add_external_initializers(names, values)
        constants = self._inline + [_declare(name, array) for name, array in self._external.items()]
        graph = helper.make_graph(self._nodes, "surespec", self._inputs, self._outputs, initializer=constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._external = {}
        del options, values, arrays
        _return_freed_memory()
        return session


def _return_freed_memory() -> None:
    """Ask glibc to give the freed source weights back to the system (it would keep hundreds of MB); else do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _declare(name: str, array: NDArray[Any]) -> TensorProto:
    """A tensor that says its type and shape, and that its data come from elsewhere."""
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype))
    tensor.dims.extend(array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="memory")
    return tensor
