"""Model files: config.json, safetensors and GGUF headers, tokenizers, chat templates."""

from __future__ import annotations

import contextlib
import json
import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fuzz_harness import Case, Surface, expect
from fuzz_mutations import NASTY_TEXTS, damaged, dump, json_texts, nasty_values, trees
from hypothesis import strategies as st

import toy
from surespec.engines.pace import _bytes_per_weight
from surespec.errors import SurespecError
from surespec.local.chat import ChatTemplate
from surespec.local.export_hf import gguf_to_hf
from surespec.local.gguf_file import GgufFile
from surespec.local.safetensors_file import SafetensorsFile
from surespec.local.speculative import parse_speculative_config
from surespec.local.tokenizer import load_tokenizer
from surespec.local.weights import load_model_files
from surespec.models import from_config, from_path

SMALL = {"hidden": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4, "intermediate": 8, "vocab": 280}


@cache
def model_files() -> dict[str, bytes]:
    """The files of a toy model, by name; ``model.gguf`` is the same as GGUF."""
    with TemporaryDirectory() as name:
        folder = toy.make_llama(Path(name) / "m", **SMALL)
        toy.make_gguf(folder / "model.gguf", folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def _documents(name: str) -> Any:
    return json.loads(model_files()[name])


def _place(folder: Path, **changed: bytes) -> Path:
    """The toy model's folder with some files changed (``__`` for the dot)."""
    files = {n: d for n, d in model_files().items() if n != "model.gguf"}
    files |= {name.replace("__", "."): data for name, data in changed.items()}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def _read_model(path: Path) -> None:
    """What ``plan`` and ``probe`` read, then what ``serve`` reads; both may refuse."""
    refusals: list[SurespecError] = []
    with _noting(refusals):
        model = from_path(path)
        expect(model.weight_bytes >= 0 and model.num_layers > 0, "an impossible model was accepted")
        json.dumps(model.model_dump(mode="json"), allow_nan=False)
    with _noting(refusals):
        files = load_model_files(path)
        total = sum(files.tensors[name].nbytes for name in files.tensors)
        expect(total < 2**26, "more weights than the file holds")
        load_tokenizer(files)
    if refusals:
        raise refusals[-1]


@contextlib.contextmanager
def _noting(refusals: list[SurespecError]) -> Any:
    try:
        yield
    except SurespecError as error:
        refusals.append(error)


# -- configurations ------------------------------------------------------------------------------------------------------

MOE = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "full_attention_interval": 4, "linear_num_value_heads": 32,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "intermediate_size": 5120, "max_position_embeddings": 262144, "torch_dtype": "bfloat16", "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}},
    "layer_types": ["full_attention"] * 48, "sliding_window": 4096, "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "text_config": {"hidden_size": 2048}, "hybrid_override_pattern": "M*M-", "kv_lora_rank": None, "eos_token_id": [1, 2],
}  # fmt: skip


def _check_config(case: Case, folder: Path) -> None:
    which, data = case
    _place(folder, **{which: data})
    with contextlib.suppress(SurespecError):
        parse_speculative_config({"model": str(folder), "num_speculative_tokens": 3})
    _read_model(folder)


def _check_shape(tree: Case, _folder: Path) -> None:
    if isinstance(tree, dict):
        model = from_config(tree, "org/model")
        json.dumps(model.model_dump(mode="json"), allow_nan=False)


def _config_cases() -> st.SearchStrategy[Case]:
    index = {"metadata": {"total_size": 4096}, "weight_map": {"model.norm.weight": "model.safetensors"}}
    quant = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    return st.one_of(
        json_texts((_documents("config.json"), MOE)).map(lambda data: ("config__json", data)),
        json_texts((_documents("config.json"),)).map(lambda data: ("config__json", data)),
        json_texts(({"eos_token_id": [1, 2]},)).map(lambda data: ("generation_config__json", data)),
        json_texts((index,)).map(lambda data: ("model__safetensors__index__json", data)),
        json_texts((quant,)).map(lambda data: ("hf_quant_config__json", data)),
        json_texts((_documents("tokenizer_config.json"),)).map(lambda data: ("tokenizer_config__json", data)),
        damaged(st.just(toy.CHAT_TEMPLATE.encode())).map(lambda data: ("chat_template__jinja", data)),
    )


# -- safetensors -----------------------------------------------------------------------------------------------------------

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
    "d": {"dtype": "F8_E4M3", "shape": [0, 7], "data_offsets": [40, 40]},
}


@st.composite
def safetensors(draw: st.DrawFn) -> bytes:
    """A file whose header is damaged, or whose length of it lies."""
    header = dump(draw(trees((HEADER,)))).encode("utf-8", "surrogatepass")
    length = len(header) + draw(st.sampled_from((0, 0, 0, 0, 1, -1, 40, 2**31, 2**63 - 1 - len(header))))
    return struct.pack("<Q", max(0, length)) + header + bytes(draw(st.sampled_from((40, 40, 40, 39, 0, 400))))


def _check_safetensors(data: Case, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    expect(_bytes_per_weight(path) in (2.0, 4.0), "bytes a weight")
    (folder / "config.json").write_bytes(model_files()["config.json"])
    refusals: list[SurespecError] = []
    with _noting(refusals):
        from_path(folder)
    with _noting(refusals):
        file = SafetensorsFile(path)
        for name, shape in file.shapes.items():
            with _noting(refusals):
                expect(file.read(name).shape == shape, "a tensor of another shape")
                file.read_float32(name)
    if refusals:
        raise refusals[-1]


# -- GGUF ------------------------------------------------------------------------------------------------------------------


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@st.composite
def ggufs(draw: st.DrawFn) -> bytes:
    """A header built entry by entry, any of whose counts, types and lengths may lie."""
    number = st.sampled_from((0, 1, 2, 3, 32, 64, 2**20 + 1, 2**31, 2**32 - 1))
    big = st.sampled_from((0, 1, 8, 32, 2**20, 2**24, 2**32, 2**61, 2**63, 2**64 - 1))
    entries, tensors = draw(st.integers(0, 5)), draw(st.integers(0, 3))
    out = struct.pack("<I", draw(st.sampled_from((3, 3, 3, 2, 1, 4, 0x03000000))))
    out += struct.pack("<Q", draw(st.sampled_from((tensors, tensors, tensors, 2**20, 2**60))))
    out += struct.pack("<Q", draw(st.sampled_from((entries, entries, entries, 2**20, 2**63))))
    keys = (
        b"general.architecture", b"general.alignment", b"llama.block_count", b"llama.embedding_length", b"general.file_type",
        b"llama.attention.head_count", b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type", b"tokenizer.ggml.merges",
        b"llama.context_length", b"llama.rope.freq_base", b"tokenizer.chat_template", b"general.name", b"\xff\xfe", b"",
    )  # fmt: skip
    for _ in range(entries):
        out += _text(draw(st.sampled_from(keys)))
        kind = draw(st.sampled_from((4, 5, 6, 7, 8, 8, 9, 9, 10, 12, 13, 255)))
        out += struct.pack("<I", kind)
        if kind == 8:
            out += _text(draw(st.sampled_from((b"llama", b"gpt2", b"\xff", b"\x1b[2J", b"a" * 900))))
        elif kind == 9:
            inner, count = draw(st.sampled_from((0, 4, 6, 8, 9, 99))), draw(st.sampled_from((0, 1, 3, 2**22, 2**60)))
            out += struct.pack("<IQ", inner, count)
            out += b"".join(_text(b"t%d" % i) if inner == 8 else struct.pack("<I", i) for i in range(min(count, 3)))
        else:
            out += struct.pack("<Q", draw(big)) if kind in (10, 11, 12) else struct.pack("<I", draw(number))
    for index in range(tensors):
        out += _text(
            draw(st.sampled_from((b"token_embd.weight", b"rope_freqs.weight", b"blk.0.attn_q.weight", b"t%d" % index)))
        )
        dims = draw(st.sampled_from((1, 1, 2, 2, 4, 0, 5, 2**31)))
        out += struct.pack("<I", dims) + b"".join(struct.pack("<Q", draw(big)) for _ in range(min(dims, 5)))
        out += struct.pack("<IQ", draw(st.sampled_from((0, 1, 2, 8, 12, 30, 99))), draw(big))
    return b"GGUF" + out + bytes(draw(st.sampled_from((0, 64, 4096))))


def _check_gguf(data: Case, folder: Path) -> None:
    path = folder / "model.gguf"
    path.write_bytes(data)
    with contextlib.suppress(SurespecError):
        file = GgufFile(path)
        for name in file.tensors:
            with contextlib.suppress(SurespecError):
                expect(file.read(name).nbytes <= 16 * len(data) + 4096, "more than the file holds", name)
    _read_model(path)


def _header_damage() -> st.SearchStrategy[bytes]:
    """The toy model's GGUF, damaged in its header mostly."""
    whole = model_files()["model.gguf"]
    head = whole.find(b"tokenizer.ggml.tokens") + 200
    return damaged(st.just(whole[:head])).map(lambda front: front + whole[head:]) | damaged(st.just(whole))


# -- tokenizers --------------------------------------------------------------------------------------------------------------

TEXT = "the 2024 rétro — 漢字 😀 and\n\n  x=1;\tit's" + "a" * 40 + "!"


@cache
def small_tokenizer() -> dict[str, Any]:
    document: dict[str, Any] = _documents("tokenizer.json")
    vocab = document["model"]["vocab"]
    document["model"]["vocab"] = {token: vocab[token] for token in list(vocab)[:290]}
    return document


_PARTS: dict[str, tuple[Any, ...]] = {
    "normalizer": (
        {"type": "NFC"}, {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}, {"type": "Prepend", "prepend": "a"},
        {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 30}] * 3},
        {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, {"type": "Precompiled", "precompiled_charsmap": "//////////////8="},
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
    ),
    "pre_tokenizer": (
        {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": "(a|a)*b"}, "behavior": "Removed", "invert": True},
        {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
        {"type": "Digits", "individual_digits": True}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        {"type": "FixedLength", "length": 0}, {"type": "UnicodeScripts"}, {"type": "CharDelimiterSplit", "delimiter": "a"},
        {"type": "Sequence", "pretokenizers": []},
    ),
    "post_processor": (
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [], "special_tokens": {}},
        {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}], "pair": [], "special_tokens": {}},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    ),
    "decoder": (
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 9, "stop": 9}]},
        {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "Replace", "pattern": {"String": ""}, "content": "aa"}, {"type": "Strip", "content": "a", "start": 2**40, "stop": 1},
    ),
    "model": (
        {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["", float("nan")]], "byte_fallback": True},
        {"type": "Unigram", "unk_id": 99, "vocab": []}, {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "x"},
        {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 0},
        {"type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": ["a a"], "dropout": 2.0},
        {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}, {"type": "BPE", "vocab": {}, "merges": [], "cache_capacity": 2**60},
        {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": [], "byte_fallback": True, "unk_token": "q", "fuse_unk": True},
    ),
    "added_tokens": (
        [{"id": 0, "content": "", "special": True, "single_word": False, "lstrip": True, "rstrip": True, "normalized": True}],
        [{"id": 4294967295, "content": "z", "special": True, "single_word": True, "lstrip": True, "rstrip": True, "normalized": True}],
    ),
    "truncation": ({"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5},),
    "padding": ({"strategy": {"Fixed": 2**40}, "direction": "Left", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0, "pad_token": ""},),
}  # fmt: skip


@st.composite
def tokenizers(draw: st.DrawFn) -> bytes:
    """The toy tokenizer with one or two parts put in from elsewhere, then damaged as a tree."""
    document = json.loads(json.dumps(small_tokenizer()))
    for part in draw(st.lists(st.sampled_from(tuple(_PARTS)), max_size=2, unique=True)):
        document[part] = draw(st.sampled_from(_PARTS[part]))
    return dump(draw(trees((document,), most=2))).encode("utf-8", "surrogatepass")


def _check_tokenizer(data: Case, folder: Path) -> None:
    """Load it, then use it as the server does: encode text of a client, decode any ids."""
    _place(folder, tokenizer__json=data)
    files = load_model_files(folder)
    tokenizer = load_tokenizer(files)
    for text in (TEXT, "", "<|im_start|>a"):
        ids = tokenizer.encode(text, add_special=True)
        expect(all(isinstance(i, int) for i in ids), "ids that are no numbers")
        tokenizer.decode(ids)
    tokenizer.decode([0, 1, 2, 200, 279, 4_000_000_000])
    tokenizer.token_text(5)


def _check_gguf_tokenizer(case: Case, folder: Path) -> None:
    """The vocabulary of a GGUF header: written anew with damaged lists."""
    import gguf

    tokens, types, merges, model, pre, template = case
    path = folder / "v.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    if tokens:
        writer.add_token_list(tokens)
    if types:
        writer.add_token_types(types)
    if merges:
        writer.add_token_merges(merges)
    writer.add_chat_template(template)
    for name, value in (
        ("block_count", 1),
        ("embedding_length", 8),
        ("feed_forward_length", 8),
        ("context_length", 64),
    ):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    whole = GgufFile(path)
    from surespec.local import gguf_weights
    from surespec.local.weights import ModelFiles

    vocab = gguf_weights._vocab(whole)
    config = gguf_weights._config(whole)
    files = ModelFiles(path, config, {}, None, vocab, template, gguf_weights._token_text(vocab, 0), "")
    tokenizer = load_tokenizer(files)
    tokenizer.decode(tokenizer.encode(TEXT, add_special=True))


_token = st.sampled_from(("a", "b", "ab", "Ġ", "Ġa", "<|x|>", "", " ", "漢", "\x1b", "\0", "t", "h", "th")) | st.text(
    max_size=3
)
_gguf_vocabs = st.tuples(
    st.lists(_token.map(lambda t: t.encode("utf-8", "replace").decode()), max_size=8), st.lists(st.integers(0, 7), max_size=8),
    st.lists(st.sampled_from(("a b", "t h", "a  b", "", "a", " ", "q r", "a b c")), max_size=3),
    st.sampled_from(("gpt2", "gpt2", "gpt2", "llama", "", "\x1b[2J")), st.sampled_from(("smollm", "qwen2", "llama-bpe", "x" * 900)),
    st.sampled_from(("{{ x }}", "")),
)  # fmt: skip


# -- chat templates ------------------------------------------------------------------------------------------------------------

MESSAGES = (
    [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi", "tool_calls": [{"a": 1}]}],
    [],
    [{"role": "x", "content": "y" * 5000}],
)
EXPRESSIONS = (
    "messages", "messages[0]['content']", "messages[0].role", "bos_token", "x", "tools", "range(100000)", "range(99999999999)", "9**9**9", "2**70",
    "'a' * 10**10", "10**10 * 'ab'", "[0] * 10**9", "'%1000000000d' % 1", "'{:>1000000000}'.format(1)", "'a'.ljust(10**10)", "'a'.zfill(9**9)",
    "'a' | center(10**9)", "'a' | indent(10**9)", "x ~ x", "[x, x]", "x + x", "x | tojson", "x | string", "x | list", "x | length", "x | join(x)",
    "range(100000) | list", "range(100000) | map('string') | join", "messages | tojson(indent=10**8)", "x | pprint", "x == x", "x in x", "x | sort",
    "x.append(x)", "x.__class__.__mro__", "self", "self.__init__.__globals__", "cycler.__init__", "lipsum(n=100000)", "joiner(x)", "namespace(a=1)",
    "raise_exception('no ' * 5000)", "raise_exception('\\x1b[2J')", "strftime_now('%Y' * 100000)", "strftime_now('\\0')", "1 / 0", "x.y.z", "x | nofilter",
    "''.join(x)", "x | batch(10**9, 0) | list", "x | slice(10**9) | list", "x | replace('a', 'aaaa')", "'a,' * 1000", "x | urlize", "x | wordwrap(1)",
    "x | truncate(5)", "x | groupby('role')", "loop.index", "loop(messages)", "caller()", "m()", "m(x)", "x.encode('utf-16')", "'\\ud800'", "x | round(10**9)",
)  # fmt: skip
STATEMENTS = (
    "{{ E }}", "{{ E }}", "{{ E }}", "{% set x = E %}", "{% set x = E %}", "{% set x = x ~ x %}" * 5, "{% set x = [x, x] %}" * 30, "{% for i in E %}", "{% endfor %}",
    "{% for i in E recursive %}", "{% if E %}", "{% else %}", "{% endif %}", "{% macro m(a) %}", "{% endmacro %}", "{% call m() %}", "{% endcall %}", "{% set x %}",
    "{% endset %}", "{% filter upper %}", "{% endfilter %}", "{% generation %}", "{% endgeneration %}", "{% break %}", "{% continue %}", "{% raw %}", "{% endraw %}",
    "{% include 'x' %}", "{% import 'os' as os %}", "{% extends E %}", "{% block b %}", "{% endblock %}", "{# c #}", "{#", "{%", "{{", "{% with x = E %}", "{% endwith %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{{ E }}{% endfor %}{% endfor %}", "{% macro m(a) %}{{ m(1) }}{{ m(2) }}{% endmacro %}{{ m(0) }}",
    "{% for i in range(99999) %}{% set x = E %}{% endfor %}", "{% set x = 'ab' %}{% for i in range(60) %}{% set x %}{{ x }}{{ x }}{% endset %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "{% set n = namespace(x=2) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
)  # fmt: skip


@st.composite
def templates(draw: st.DrawFn) -> str:
    """Statements of the template language, each with some expression; most refuse, some would never end."""
    out = []
    for _ in range(draw(st.integers(1, 5))):
        out.append(draw(st.sampled_from(STATEMENTS)).replace("E", draw(st.sampled_from(EXPRESSIONS))))
    return "".join(out)


def _check_template(case: Case, _folder: Path) -> None:
    source, choice = case
    template = ChatTemplate(source, "<s>", "</s>")
    text = template.render(MESSAGES[choice])
    expect(isinstance(text, str) and len(text) <= 2**25, "an endless prompt", str(len(text)))


def _template_cases() -> st.SearchStrategy[Case]:
    sources = st.one_of(
        templates(), templates(), damaged(st.just(toy.CHAT_TEMPLATE.encode())).map(lambda b: b.decode("utf-8", "replace")),
        st.sampled_from(NASTY_TEXTS), st.text(max_size=40),
    )  # fmt: skip
    return st.tuples(sources, st.integers(0, 2))


# -- the whole way: export -------------------------------------------------------------------------------------------------------


def _check_export(data: Case, folder: Path) -> None:
    """``surespec fetch --format hf`` makes a folder out of a GGUF file."""
    path = folder / "model.gguf"
    path.write_bytes(data)
    gguf_to_hf(path, folder / "out")


SURFACES = (
    Surface("model-config", _config_cases(), _check_config, share=1.2),
    Surface("model-shape", trees((_documents("config.json"), MOE)) | nasty_values().map(lambda v: {"hidden_size": v}), _check_shape, share=1.2),
    Surface("safetensors", safetensors() | damaged(safetensors()) | st.binary(max_size=60), _check_safetensors, share=1.5),
    Surface("gguf", ggufs() | ggufs() | _header_damage() | st.binary(max_size=60).map(lambda b: b"GGUF" + b), _check_gguf, share=1.5),
    Surface("tokenizer", tokenizers() | damaged(st.deferred(lambda: st.just(json.dumps(small_tokenizer()).encode()))), _check_tokenizer, share=0.7),
    Surface("gguf-tokenizer", _gguf_vocabs, _check_gguf_tokenizer, share=0.3),
    Surface("chat-template", _template_cases(), _check_template, share=0.3, quick=25),
    Surface("gguf-export", _header_damage(), _check_export, share=0.1, quick=8),
)  # fmt: skip
