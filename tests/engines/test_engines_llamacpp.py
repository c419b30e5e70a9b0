"""llama.cpp: what a build takes is read from its help, and every arm is spelt for that build."""

from __future__ import annotations

import stat
import sys
import textwrap
from pathlib import Path

import pytest

from surespec.core import BASELINE, Arm
from surespec.engines.base import EngineSettings
from surespec.engines.failures import classify
from surespec.engines.llamacpp import (
    LlamaBuild,
    LlamaCppEngine,
    draft_flags,
    find_build,
    make_llamacpp,
    parse_help,
    stage_of,
)
from surespec.engines.log_tail import clean
from surespec.errors import ConfigError, EngineError, ModelError

DATA = Path(__file__).parent.parent / "data" / "engines"
HELP = (DATA / "llamacpp-help.txt").read_text(encoding="utf-8")
NEW = parse_help(HELP)
OLD = parse_help(
    "-m, --model FNAME  model\n-md, --model-draft FNAME  draft\n--draft, --draft-max N  number\n--host H\n--port P\n"
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
DRAFT = {"method": "draft_model", "model": "d.gguf", "num_speculative_tokens": 4}

# A program that answers --help like a new build, and otherwise serves one streamed answer per request.
PROGRAM = textwrap.dedent(
    """
    import json, sys
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    if "--help" in sys.argv:
        print(open({help!r}).read())
        sys.exit(0)
    if "--break" in sys.argv:
        print("error: invalid argument: --break", file=sys.stderr)
        sys.exit(1)
    print("0.00.000.001 I srv    load_model: loading model 'm.gguf'", " ".join(sys.argv[1:]), flush=True)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(json.dumps({{"data": [{{"id": "m"}}]}}))

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            chunk = json.dumps({{"choices": [{{"delta": {{"content": "hi"}}}}]}})
            self.answer("data: " + chunk + "\\n\\ndata: [DONE]\\n\\n")

        def answer(self, text):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            return

    print("0.00.000.002 I main: server is listening", flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
    """
)


def arm(config: dict[str, object]) -> Arm:
    k = int(str(config["num_speculative_tokens"]))
    method = str(config["method"])
    return Arm(name=f"{method}-k{k}", method=method, num_speculative_tokens=k, speculative_config=config)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "llama-server"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\n" + PROGRAM.format(help=str(DATA / "llamacpp-help.txt")), encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def engine(program: Path, gguf: Path) -> LlamaCppEngine:
    return make_llamacpp(str(gguf), "fp32", EngineSettings(program=program, max_model_len=1024, max_num_seqs=2))


def test_the_help_names_what_a_build_takes() -> None:
    assert {
        "-m",
        "--model",
        "-md",
        "--spec-draft-model",
        "--spec-type",
        "--metrics",
        "--spec-ngram-simple-size-m",
    } <= NEW
    assert "--spec-default" in NEW, "the last entry counts too"


def test_flags_listed_as_removed_are_not_taken() -> None:
    assert not {"--draft", "--draft-max", "--draft-min", "--spec-ngram-size-n", "--spec-ngram-size-m"} & NEW
    assert "--draft-max" in OLD


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [
        (DRAFT, NEW, "--spec-type draft-simple -md d.gguf --spec-draft-n-max 4"),
        (DRAFT, OLD, "-md d.gguf --draft-max 4 --draft-min 0"),
        ({**DRAFT, "method": "eagle3"}, NEW, "--spec-type draft-eagle3 -md d.gguf --spec-draft-n-max 4"),
        (NGRAM, NEW, "--spec-type ngram-simple --spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m 5"),
        (
            {**NGRAM, "method": "ngram-map-k", "prompt_lookup_min": 3},
            NEW,
            "--spec-type ngram-map-k --spec-ngram-map-k-size-n 3 --spec-ngram-map-k-size-m 5",
        ),
        (
            {**NGRAM, "method": "ngram-mod"},
            NEW,
            "--spec-type ngram-mod --spec-ngram-mod-n-match 2 --spec-ngram-mod-n-min 1 --spec-ngram-mod-n-max 5",
        ),
        (
            NGRAM,
            frozenset({"--spec-type", "--spec-ngram-size-n", "--spec-ngram-size-m"}),
            "--spec-type ngram-simple --spec-ngram-size-n 2 --spec-ngram-size-m 5",
        ),
    ],
)
def test_an_arm_in_the_words_of_a_build(config, flags, expected) -> None:
    assert draft_flags(config, flags, str(config.get("model", ""))) == expected.split()


def test_k_of_an_ngram_drafter_is_its_m_gram() -> None:
    """--spec-draft-n-max does nothing for it: seen, a server told 5 that way drafted up to 48 tokens a step."""
    assert "--spec-draft-n-max" not in draft_flags(NGRAM, NEW)


@pytest.mark.parametrize("config", [NGRAM, {**DRAFT, "method": "eagle3"}])
def test_an_old_build_drafts_with_a_model_only(config) -> None:
    with pytest.raises(ConfigError, match="no --spec-type"):
        draft_flags(config, OLD, "d.gguf")


def test_a_kind_without_its_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="--spec-ngram-size-n"):
        draft_flags({**NGRAM, "method": "ngram-map-k4v"}, NEW)


def test_the_command(engine: LlamaCppEngine, program: Path, gguf: Path) -> None:
    base = f"{program} -m {gguf} --host 127.0.0.1 --port 8000 -c 2048 -np 2 --metrics".split()
    assert engine.command(BASELINE) == base
    assert engine.command(arm(NGRAM))[len(base) :] == draft_flags(NGRAM, NEW)


def test_libraries_beside_the_program_are_found(program: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/other")
    (program.parent / "libllama.so.1").write_bytes(b"")
    engine = make_llamacpp(str(gguf), "fp32", EngineSettings(program=program))
    assert engine.command(BASELINE)[:2] == ["env", f"LD_LIBRARY_PATH={program.parent}:/opt/other"]


def test_the_build_is_found_by_variable_and_path(
    program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SURESPEC_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("SURESPEC_LLAMACPP_PROGRAM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(EngineError, match=r"no llama\.cpp here"):
        find_build()
    monkeypatch.setenv("PATH", str(program.parent))
    assert find_build().program == program
    monkeypatch.setenv("SURESPEC_LLAMACPP_PROGRAM", str(program.parent))
    assert find_build().program == program, "a folder will do"
    monkeypatch.setenv("SURESPEC_LLAMACPP_PROGRAM", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="absent"):
        find_build()


def test_what_is_no_llama_server_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "llama-server"
    other.write_text("#!/bin/sh\necho something else\n", encoding="utf-8")
    other.chmod(0o755)
    with pytest.raises(EngineError, match="something else"):
        find_build(other)


def test_heads_of_hugging_face_are_refused_with_the_way_to_convert_them(engine: LlamaCppEngine) -> None:
    head = {"method": "eagle3", "model": "/heads/EAGLE3-LLaMA3.1", "num_speculative_tokens": 3}
    said = engine.refusal(arm(head))
    assert "convert_hf_to_gguf.py /heads/EAGLE3-LLaMA3.1 --target-model-dir FOLDER-OF-THE-TARGET" in said
    assert "EAGLE3-LLaMA3.1.gguf" in said
    assert engine.refusal(arm({**head, "model": "/heads/x.gguf"})) == ""
    assert engine.refusal(BASELINE) == ""


def test_what_the_build_cannot_do_is_refused(engine: LlamaCppEngine, program: Path) -> None:
    old = LlamaCppEngine(engine.model, engine.target, LlamaBuild(program, OLD), engine.settings)
    assert "no --spec-type" in old.refusal(arm(NGRAM))


@pytest.mark.parametrize(
    ("model", "words"), [("smollm2-135m-eagle3", "GGUF"), ("absent.gguf", "no model"), (".", "convert_hf_to_gguf")]
)
def test_only_gguf_files_are_served(program: Path, model: str, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        make_llamacpp(model, "fp32", EngineSettings(program=program))
    assert words in str(caught.value)


def test_precision_is_the_files_own(program: Path, gguf: Path) -> None:
    with pytest.raises(ConfigError, match="int8"):
        make_llamacpp(str(gguf), "int8", EngineSettings(program=program))


def test_a_missing_draft_is_named_before_the_first_launch(engine: LlamaCppEngine) -> None:
    with pytest.raises(ModelError, match=r"d\.gguf"):
        engine.prepare([BASELINE, arm(DRAFT)], lambda *_: None)


def test_what_can_be_mended(engine: LlamaCppEngine) -> None:
    remedies = {
        r.name: r for r in classify("llamacpp", "start", 1, None, ["failed to allocate buffer for kv cache"]).remedies
    }
    shorter = engine.mended(BASELINE, remedies["shorter_context"])
    assert shorter is not None and "1024" in shorter.command(BASELINE) and "2048" in engine.command(BASELINE)
    assert engine.mended(BASELINE, remedies["raise_utilization"]) is None


def test_a_launch(engine: LlamaCppEngine, tmp_path: Path) -> None:
    stages: list[str] = []
    server = engine.start(arm(NGRAM), tmp_path / "log", stages.append)
    try:
        assert server.alive()
        assert "loading the weights" in stages and stages[-1] == "answering a first request"
        assert "--spec-ngram-simple-size-m 5" in (tmp_path / "log").read_text()
    finally:
        server.stop()
    assert not server.alive()


def test_stages_are_those_of_the_log() -> None:
    log = (DATA / "llamacpp-no-draft.log").read_text(encoding="utf-8").splitlines()
    assert list(dict.fromkeys(filter(None, (stage_of(clean(line)) for line in log)))) == [
        "loading the weights",
        "loading the drafter",
    ]
