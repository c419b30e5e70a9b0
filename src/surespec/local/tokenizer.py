"""Text <-> token ids, from a tokenizer.json or rebuilt from a GGUF's vocabulary, and text while tokens still arrive."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from surespec.errors import ModelError
from surespec.json_text import loads_json
from surespec.local.chat import ChatTemplate
from surespec.local.weights import GgufVocab, ModelFiles

CONTROL, USER_DEFINED = 3, 4  # token types of a GGUF

# How the families split text before merging. The patterns are data of the models: they are those of the published
# tokenizer.json files of Qwen2 and Llama 3.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
PRE_TOKENIZERS = ("smollm", "qwen2", "llama-bpe", "llama3", "gpt-2", "default")
REPLACEMENT = "�"
PENDING = 3  # a UTF-8 character has at most 4 bytes, so at most 3 can wait for the rest
WINDOW = 32
MAX_GROWTH = 1000.0  # characters that replacements may make of one; real tokenizers: a few


def _whole(work: Callable[[], Any]) -> Any:
    """What the library answers. Raises ModelError where its own code fails on a tokenizer that does not fit itself."""
    try:
        return work()
    except BaseException as error:  # a panic of a Rust library is no Exception
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise ModelError(f"The model's tokenizer fails: {error}.", hint="Fetch the model again.") from None
        raise


class Tokenizer:
    """A model's tokenizer with its chat template.

    ``eos_token_ids``: all ids that end an answer. ``vocab_size``: number of tokens known (a model's output may be
    wider, where rows were added for alignment).
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: ModelFiles) -> None:
        self._backend = backend
        self._files = files
        self._template: ChatTemplate | None = None
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        named = backend.token_to_id(files.eos_token) if files.eos_token else None
        ids = (*files.config.eos_token_ids, *(() if named is None else (named,)))
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised. ``add_special``: with BOS where the
        model wants one (for plain text; a chat template writes its own)."""
        ids: list[int] = _whole(lambda: self._backend.encode(text, add_special_tokens=add_special).ids)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD, ids without a token become nothing."""
        text: str = _whole(lambda: self._backend.decode(list(ids), skip_special_tokens=skip_special))
        return text

    def token_text(self, token_id: int) -> str:
        """One token as text, special or not (for log-probabilities)."""
        return self.decode([token_id], skip_special=False)

    def save(self, path: Path) -> None:
        """Write it as a tokenizer.json."""
        self._backend.save(str(path))

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The prompt for a chat. ConfigError when there is no template or it refuses the messages."""
        if self._template is None:
            files = self._files
            self._template = ChatTemplate(files.chat_template, files.bos_token, files.eos_token)
        return self._template.render(messages, add_generation_prompt, tools)


class IncrementalDetokenizer:
    """Turns tokens into text as they come, and never gives out half a character.

    All pieces together equal ``decode`` of all ids at once.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._given = 0  # characters of the decoded window that were given out

    def push(self, ids: Iterable[int]) -> str:
        """Take further ids; return the text that is certain now."""
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids, self._skip_special)
        settled = len(text)
        while settled > 0 and len(text) - settled < PENDING and text[settled - 1] == REPLACEMENT:
            settled -= 1
        piece = text[self._given : settled]
        self._given = max(self._given, settled)
        if len(self._ids) > WINDOW and settled == len(text):
            # Some decoders treat the first token apart, so a few old ones stay in front.
            self._ids = self._ids[-4:]
            self._given = len(self._tokenizer.decode(self._ids, self._skip_special))
        return piece

    def flush(self) -> str:
        """The text still held back, once no more tokens come."""
        text = self._tokenizer.decode(self._ids, self._skip_special)
        piece = text[self._given :]
        self._given = len(text)
        return piece


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a model. ModelError when there is none, it is broken, or it does not fit the vocabulary."""
    if files.tokenizer_path is not None:
        try:
            _check_steps(files.tokenizer_path)
            backend = _whole(lambda: tokenizers.Tokenizer.from_file(str(files.tokenizer_path)))
        except (ModelError, OSError, ValueError) as error:
            raise ModelError(
                f"{files.tokenizer_path} cannot be read: {error}.", hint="Fetch the model again."
            ) from error
        backend.no_truncation()
        backend.no_padding()
        where = str(files.tokenizer_path)
    elif files.gguf_vocab is not None:
        backend, where = _from_gguf(files.gguf_vocab, files), str(files.path)
    else:
        raise ModelError(
            f"{files.path} has no tokenizer.json.", hint="Put the model's tokenizer.json beside its config.json."
        )
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= files.config.vocab_size:
        raise ModelError(
            f"{where}: token id {highest} lies outside the model's vocabulary of {files.config.vocab_size}.",
            hint="The tokenizer belongs to another model; fetch the model again.",
        )
    return Tokenizer(backend, files)


def _check_steps(path: Path) -> None:
    """Raise ValueError for steps that the library would run out of memory with, which ends the process: a table
    (SentencePiece's) that says it is longer than it is, and replacements that multiply a text one after the other."""
    document = loads_json(path.read_bytes())
    for name in ("normalizer", "decoder"):
        growth = 1.0
        for step in _steps(document.get(name) if isinstance(document, dict) else None):
            if "precompiled_charsmap" in step:  # the library, too, goes by the fields where the type is missing
                table = base64.b64decode(str(step.get("precompiled_charsmap", "")))
                if len(table) < 4 or int.from_bytes(table[:4], "little") > len(table) - 4:
                    raise ValueError(f"a table of its {name} is cut off")
            elif "content" in step:
                pattern = step.get("pattern")
                found = str(pattern.get("String", "")) if isinstance(pattern, dict) else ""
                growth *= max(1.0, len(str(step.get("content", ""))) / max(1, len(found)))
        if growth > MAX_GROWTH:
            raise ValueError(f"its {name} makes {growth:.3g} characters of one")


def _steps(section: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or decoder, those of sequences one by one."""
    if isinstance(section, dict):
        inner = [section[key] for key in ("normalizers", "decoders") if isinstance(section.get(key), list)]
        for one in (step for steps in inner for step in steps):
            yield from _steps(one)
        yield section


def _from_gguf(vocab: GgufVocab, files: ModelFiles) -> tokenizers.Tokenizer:
    if vocab.model != "gpt2" or vocab.pre not in PRE_TOKENIZERS:
        kind = f"'{vocab.model}' with pre-tokenizer '{vocab.pre}'"
        raise ModelError(
            f"{files.path}: its tokenizer is {kind}, which is not supported.",
            hint=f"Byte-level BPE with {', '.join(PRE_TOKENIZERS)} is; or use the model's safetensors form.",
        )
    ids = {token: index for index, token in enumerate(vocab.tokens)}
    merges: list[tuple[str, str]] = []
    for merge in vocab.merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            raise ModelError(f"{files.path}: the merge {merge!r} names tokens that the vocabulary does not have.")
        merges.append((left, right))
    llama3 = vocab.pre in ("llama-bpe", "llama3")
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=llama3))
    if vocab.pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(vocab.pre)
    backend.decoder = decoders.ByteLevel()
    pairs = list(zip(vocab.tokens, vocab.token_types, strict=True))
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, kind in pairs if kind == CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in pairs if kind == USER_DEFINED])
    if vocab.add_bos and files.bos_token:
        special = [(files.bos_token, ids[files.bos_token])]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{files.bos_token} $A", pair=None, special_tokens=special
        )
    return backend


def _pre_tokenizer(name: str) -> Any:
    if name in ("qwen2", "llama-bpe", "llama3"):
        pattern = Regex(QWEN2_SPLIT if name == "qwen2" else LLAMA3_SPLIT)
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":  # every digit is a token
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level
