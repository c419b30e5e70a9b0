"""Logs: secrets do not stay in them, and the line that matters is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surespec.engines.log_tail import clean, last_meaningful, read_tail, redact, redact_file

DATA = Path(__file__).parent.parent / "data" / "engines"


@pytest.mark.parametrize(
    "line",
    [
        "HF_TOKEN=s3cr3tvalue",
        "export HUGGING_FACE_HUB_TOKEN='s3cr3tvalue'",
        '{"hf_token": "s3cr3tvalue", "port": 8000}',
        "args: Namespace(api_key=['s3cr3tvalue'], port=8000)",
        "non-default args: {'api_key': ['first', 's3cr3tvalue'], 'port': 8000}",
        "llama-server --api-key s3cr3tvalue --port 8000",
        "OPENAI_API_KEY: s3cr3tvalue",
        "AWS_SECRET_ACCESS_KEY=s3cr3tvalue",
        "Authorization: Bearer s3cr3tvalue",
        "git clone https://me:s3cr3tvalue@example.org/x.git",
    ],
)
def test_secrets_by_name(line: str) -> None:
    safe = redact(line)
    assert "s3cr3t" not in safe
    assert ("8000" in safe) == ("8000" in line), "what is no secret stays"
    assert redact(safe) == safe


@pytest.mark.parametrize("token", ["hf_AbCdEfGhIjKlMnOpQrSt", "sk-proj-AbCdEfGhIjKlMnOp", "nvapi-AbCdEfGhIjKlMnOp12"])
def test_secrets_by_form(token: str) -> None:
    assert token not in redact(f"something {token}, and more")


@pytest.mark.parametrize(
    "line",
    [
        "hf_token=None, api_key=None, api_key=[], num_tokens=5",
        "docker run -e HF_TOKEN -v /models:/models image",
        "Prefill 512 tokens; max_tokens: 128; eos_token='</s>'; tokenizer=org/name",
        "GET https://huggingface.co/api/models/org/name 200",
    ],
)
def test_what_is_no_secret_stays(line: str) -> None:
    assert redact(line) == line


@given(st.text(max_size=200))
def test_any_text_is_redacted_once(text: str) -> None:
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("\x1b[0;36m(EngineCore pid=25)\x1b[0;0m ERROR 12-02 10:39:59 [core.py:1433] ValueError: x", "ValueError: x"),
        ("(EngineCore_DP0 pid=43623)     rotary_kernel[grid](", "    rotary_kernel[grid]("),
        ("0.00.012.786 E srv    load_model: failed", "srv    load_model: failed"),
        ("[2025-08-22 21:41:04 TP0] Scheduler hit an exception", "Scheduler hit an exception"),
        ("[07/08/2025-19:47:15] [TRT-LLM] [RANK 1] [E] Failed to", "Failed to"),
        ("loading:  10%|#   |\rloading: 100%|####|", "loading: 100%|####|"),
        ("  File x, line 3", "  File x, line 3"),
    ],
)
def test_a_line_without_its_prefix(line: str, said: str) -> None:
    assert clean(line) == said


def test_the_tail_of_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 500 + b"\nfirst\nHF_TOKEN=abc \xff\nlast\n")
    assert read_tail(path, 40) == ["first", "HF_TOKEN=<removed> �", "last"]
    assert read_tail(tmp_path / "none") == []


def test_the_line_that_matters() -> None:
    lines = (DATA / "vllm-lookup-bounds.log").read_text(encoding="utf-8").splitlines()
    assert last_meaningful([clean(line) for line in lines]).startswith("Value error, prompt_lookup_min=9 must be <=")
    lines = (DATA / "vllm-no-kv-space.log").read_text(encoding="utf-8").splitlines()
    assert last_meaningful([clean(line) for line in lines]).startswith("ValueError: To serve at least one request")
    assert last_meaningful(["all is well", "    ^^^^"]) == "all is well"
    assert last_meaningful([]) == ""


def test_a_kept_log_is_rewritten_only_when_it_has_to_be(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("one\r\napi_key=['abc']\nthree")
    assert redact_file(path) is True
    assert path.read_bytes() == b"one\r\napi_key=[<removed>]\nthree"
    before = path.stat().st_ino
    assert redact_file(path) is False and path.stat().st_ino == before
    assert redact_file(tmp_path / "none") is False
    assert list(tmp_path.iterdir()) == [path]
