"""Every document that --json prints follows the schema that ``surespec schema`` exports, with no field left out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from surespec import schemas
from surespec.errors import UsageError

SRC = Path(schemas.__file__).parent
RECIPE = """docker run --rm --runtime nvidia -p 8000:8000 -e HF_TOKEN=hf_secret --entrypoint vllm \\
  vllm/vllm-openai:v0.27.1 serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192 --port 8000
"""


def run(*arguments: str, cwd: Path) -> dict:
    """The document a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "surespec", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=100,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def check(document: dict) -> str:
    """The noun, after the document was held against its schema, once as exported and once with nothing unknown."""
    noun = re.fullmatch(r"surespec/(\w+)/1", document["schema"])[1]
    exported = schemas.schema(noun)
    Draft202012Validator.check_schema(exported)
    for schema in (exported, closed(exported)):
        errors = [f"{e.json_path}: {e.message[:200]}" for e in Draft202012Validator(schema).iter_errors(document)]
        assert errors == []
    return noun


def closed(node):
    """The schema with no unknown fields allowed, so that a field nobody described is found."""
    if isinstance(node, list):
        return [closed(value) for value in node]
    if not isinstance(node, dict):
        return node
    out = {key: closed(value) for key, value in node.items()}
    if "properties" in out and isinstance(node.get("type"), str) and "additionalProperties" not in out:
        out["additionalProperties"] = False
    return out


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "run.sh"
    file.write_text(RECIPE)
    return file


NGRAM = '{"method":"ngram","num_speculative_tokens":5}'
PLAN = ("plan", "--offline", "--json", "--device", "thor-t5000")


@pytest.mark.parametrize(
    ("noun", "arguments"),
    [
        ("probe", ("probe", "--json", "--recipe", "run.sh", "--offline", "--device", "thor-t5000")),
        ("plan", (*PLAN, "--recipe", "run.sh")),
        ("plan", (*PLAN, "--model", "meta-llama/Llama-3.1-8B-Instruct", "--engine", "dynamo")),
        ("apply", ("apply", "--recipe", "run.sh", "--speculative-config", NGRAM, "--dry-run", "--json")),
        ("tune_plan", ("tune", "--dry-run", "--json")),
        ("rule", ("explain", "W4", "--json")),
        ("rules", ("explain", "--json")),
        ("doctor", ("doctor", "--json")),
        ("schemas", ("schema", "--json")),
    ],
)
def test_what_a_command_prints_follows_its_schema(noun, arguments, recipe, tmp_path):
    assert check(run(*arguments, cwd=tmp_path)) == noun


def test_apply_then_undo(recipe, tmp_path):
    before = recipe.read_bytes()
    args = ("apply", "--recipe", "run.sh", "--speculative-config", NGRAM, "--yes", "--json")
    document = run(*args, cwd=tmp_path)
    assert check(document) == "apply"
    assert document["written"] is True
    assert check(run("undo", "run.sh", "--json", cwd=tmp_path)) == "undo"
    assert recipe.read_bytes() == before


def test_results_and_verdicts(tmp_path):
    from surespec.bench.interop import load_result
    from surespec.judge import judge_results
    from surespec.rules import policy

    one = {"concurrency": 1, "ttft_ms_p50": 20.0, "ttft_ms_p99": 30.0, "itl_ms_p50": 9.0, "itl_ms_p99": 12.0,
           "tpot_ms_p50": 10.0, "throughput_tok_s": 90.0, "e2e_latency_ms_p50": 1300.0}  # fmt: skip
    envelope = {"skill": "jetson-llm-benchmark", "runtime": "vllm", "model": "m", "sku": "thor", "generation": "thor",
                "product_line": "agx", "variant": "thor-t5000", "l4t": "38.4", "benchmark_mode": "native",
                "container": "", "config": {"input_len": 64, "output_len": 128, "num_prompts": 50},
                "runs": [one, {**one, "concurrency": 8}], "warnings": []}  # fmt: skip
    file = tmp_path / "result.json"
    file.write_text(json.dumps(envelope))
    result = load_result(file)
    assert check(json.loads(json.dumps(result.document()))) == "bench"
    judgement = judge_results(result, result, policy("jetson"), names=("a", "b"))
    for noun in ("judge", "tune"):
        assert check(json.loads(json.dumps(judgement.document(noun)))) == noun


def test_every_schema_name_in_the_code_is_exported():
    named = set()
    for file in SRC.rglob("*.py"):
        named |= set(re.findall(r'"surespec/(\w+)/1"', file.read_text(encoding="utf-8")))
    assert named <= set(schemas.nouns())


def test_an_unknown_noun_names_the_known_ones():
    with pytest.raises(UsageError, match=r"Known: fetch, probe, plan"):
        schemas.schema("speed")


def test_a_field_that_is_missing_or_of_another_type_is_found(tmp_path):
    document = run("explain", "W4", "--json", cwd=tmp_path)
    validator = Draft202012Validator(schemas.schema("rule"))
    assert validator.is_valid(document)
    assert validator.is_valid({**document, "added_later": 1})
    assert not validator.is_valid({**document, "why": 3})
    assert not validator.is_valid({k: v for k, v in document.items() if k != "source"})
