"""`tune --recipe`: the user's own command is started, with nothing changed but what must be."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import stand_ins
import toy
from surespec.apply import decision, plan_apply, write
from surespec.bench.runner import BenchOptions, bench
from surespec.core import BASELINE
from surespec.engines.from_recipe import recipe_engine
from surespec.errors import ConfigError, EngineError, ModelError, UsageError
from surespec.recipe.command import command_of, secrets_of
from surespec.recipe.read import read_recipe
from surespec.store import Bundle
from surespec.tune import TuneProgress, tune
from surespec.tune_plan import TuneOptions, make_arm, plan_tune
from test_tune import Deployment

KEY = "sk-very-secret-0123456789"
PATHS = {"PATH": "/v/bin:/bin"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return toy.make_llama(tmp_path_factory.mktemp("toy") / "model", max_position_embeddings=2048)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    folder = stand_ins.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MARK_TOKEN", KEY)
    return folder


def written(tmp_path, text, name="serve.sh"):
    path = tmp_path / name
    path.write_text(text)
    return path


def native(tmp_path, model, extra=""):
    (tmp_path / "work").mkdir(exist_ok=True)
    return written(
        tmp_path,
        f"#!/bin/bash\nexport MARK_MODE=fast\ncd {tmp_path}/work\n"
        f"MARK_ONE=1 vllm serve {model} --port 8000 --max-model-len 2048 --api-key {KEY}{extra} > log 2>&1 &\n",
    )


def container(tmp_path, model, options="-p 8000:8000"):
    return written(
        tmp_path,
        f"docker run -itd --name mine --restart always {options} -e MARK_TOKEN=$MARK_TOKEN -e MARK_MODE=fast \\\n"
        f"  vllm/vllm-openai:v0.31.0 {model} --max-model-len 2048\n",
    )


def test_a_native_command_is_started_as_it_stands(programs, model, tmp_path):
    engine = recipe_engine(read_recipe(native(tmp_path, model)))
    arm = make_arm("ngram", 3)
    server = engine.start(arm, tmp_path / "server.log")
    try:
        result = bench(BenchOptions(server.endpoint, concurrency=(1,), prompts="copy", num_prompts=2, output_len=8))
    finally:
        server.stop()
    assert result.runs[0].failed == 0
    seen = stand_ins.record(programs)[-1]
    assert seen["cwd"] == str(tmp_path / "work")
    assert {k: seen["env"][k] for k in ("MARK_MODE", "MARK_ONE")} == {"MARK_MODE": "fast", "MARK_ONE": "1"}
    words = seen["vllm"]
    assert words[:4] == ["serve", str(model), "--max-model-len", "2048"]
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert f"http://127.0.0.1:{words[words.index('--port') + 1]}" == server.endpoint
    assert json.loads(words[words.index("--speculative-config") + 1])["num_speculative_tokens"] == 3
    assert KEY not in " ".join(words), "nobody else reaches it, so no key stands in the list of processes"


def test_the_printed_command_hides_secrets_and_keeps_the_port(programs, model, tmp_path):
    engine = recipe_engine(read_recipe(native(tmp_path, model)))
    shown = " ".join(engine.command(BASELINE))
    assert KEY not in shown and "--port 8000" in shown and "--api-key ***" in shown and "MARK_MODE=fast" in shown
    engine = recipe_engine(read_recipe(container(tmp_path, model)))
    shown = " ".join(engine.command(BASELINE))
    assert KEY not in shown and "-p 8000:8000" in shown and "-e MARK_TOKEN " in shown and "-e MARK_MODE=fast" in shown


@pytest.mark.parametrize("options", ["-p 8000:8000", "--network host"])
def test_a_container_gets_its_own_name_and_a_local_port_and_is_removed(programs, model, tmp_path, options):
    engine = recipe_engine(read_recipe(container(tmp_path, model, options)))
    server = engine.start(make_arm("ngram", 2), tmp_path / "server.log")
    port = server.endpoint.rpartition(":")[2]
    try:
        given = next(entry["docker"] for entry in stand_ins.record(programs) if "docker" in entry)
        assert given[:3] == ["run", "--rm", "--name"] and given[3].startswith("surespec-")
        assert not {"-d", "-itd", "--restart", "mine"} & set(given)
        assert KEY not in " ".join(given), "docker takes it from its own environment"
        inside = stand_ins.record(programs)[-1]
        assert inside["env"] == {"MARK_TOKEN": KEY, "MARK_MODE": "fast"}
        if "host" in options:
            assert given[-5:-1:2] == ["--port", "--host"] or ["--port", port] == given[-4:-2], given
        else:
            assert f"127.0.0.1:{port}:8000" in given
    finally:
        server.stop()
    assert stand_ins.record(programs)[-1]["docker"] == ["rm", "-f", given[3]]
    assert not list(programs.glob("*.pid"))


@pytest.mark.skipif(sys.platform != "linux", reason="the guard is Linux's")
def test_a_container_does_not_outlive_a_killed_surespec(programs, model, tmp_path):
    recipe = container(tmp_path, model)
    code = (
        "import sys, time; from pathlib import Path; from surespec.core import BASELINE;"
        "from surespec.recipe.read import read_recipe; from surespec.engines.from_recipe import recipe_engine;"
        f"recipe_engine(read_recipe(Path({str(recipe)!r}))).start(BASELINE, Path({str(tmp_path / 'log')!r}));"
        "print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline().strip() == "ready"
        pid = int(next(programs.glob("*.pid")).read_text())
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_a_whole_tune_of_a_recipe(programs, model, tmp_path, monkeypatch):
    monkeypatch.setattr("surespec.tune.check_existing", lambda plan: ())
    recipe = native(tmp_path, model, " --gpu-memory-utilization 0.85")
    options = TuneOptions(
        recipe=str(recipe),
        out=tmp_path / "run",
        concurrency=(1,),
        prompts="copy",
        num_prompts=2,
        output_len=8,
        budget_s=8,
    )
    judgement = tune(options)
    assert all(launch.status == "ok" for launch in judgement.launches), [x.failure for x in judgement.launches]
    assert judgement.lossless is True
    manifest = Bundle.open(tmp_path / "run").manifest
    assert manifest["options"]["recipe"] == str(recipe) and manifest["options"]["engine"] == "vllm"
    kept = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert KEY.encode() not in kept
    drafted = [entry["vllm"] for entry in stand_ins.record(programs) if "--speculative-config" in entry["vllm"]]
    assert drafted and all(w[w.index("--gpu-memory-utilization") + 1] == "0.80" for w in drafted), "rule C5"


def kept_run(tmp_path, recipe, told=None):
    class Told(TuneProgress):
        def note(self, text):
            if told is not None:
                told.append(text)

    deployment = Deployment(positions={"ngram": (0.9, 0.85, 0.8, 0.75, 0.7)})
    options = TuneOptions(recipe=str(recipe), out=tmp_path / "run")
    return tune(options, Told(), measure=deployment, clock=deployment.clock)


def test_a_kept_setting_is_applied_to_the_recipe_of_the_run(programs, model, tmp_path):
    recipe, told = native(tmp_path, model), []
    judgement = kept_run(tmp_path, recipe, told)
    assert judgement.verdict == "keep"
    assert any("surespec apply" in text for text in told)
    decided = decision(tmp_path / "run")
    assert decided.recipe == recipe
    write(plan_apply(decided.recipe, decided.speculative_config, folder=tmp_path / "run" / "recipe"))
    again = read_recipe(recipe)
    assert again.speculative_config == judgement.speculative_config
    assert "--api-key " + KEY in recipe.read_text(), "all else stays"


def test_a_recipe_that_changed_is_not_resumed(programs, model, tmp_path):
    recipe = native(tmp_path, model)
    kept_run(tmp_path, recipe)
    recipe.write_text(recipe.read_text().replace("2048", "1024"))
    with pytest.raises(ConfigError, match="was changed since the run"):
        tune(TuneOptions(out=tmp_path / "run", resume=True))


def test_what_the_recipe_does_now_is_tried_first(programs, model, tmp_path):
    config = '{"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":3}'
    recipe = native(tmp_path, model, f" --speculative-config '{config}'")
    plan = plan_tune(TuneOptions(recipe=str(recipe)))
    assert [arm.name for arm in plan.arms] == ["baseline", "ngram-k2"]
    assert plan.arms[1].speculative_config["prompt_lookup_max"] == 3
    assert "--speculative-config" not in plan.commands["baseline"]
    assert "--speculative-config" in plan.commands["ngram-k2"]


def test_a_head_the_container_cannot_see_is_left_out(programs, model, tmp_path):
    head = tmp_path / "head"
    head.mkdir()
    options = TuneOptions(recipe=str(container(tmp_path, model)), eagle3_head=str(head))
    plan = plan_tune(options)
    assert [arm.method for arm in plan.probes] == ["ngram"]
    assert any("cannot see" in remark and f"-v {head}:{head}:ro" in remark for remark in plan.remarks)
    seen = container(tmp_path, model, f"-p 8000:8000 -v {tmp_path}:/data")
    plan = plan_tune(TuneOptions(recipe=str(seen), eagle3_head=str(head)))
    assert plan.probes[0].speculative_config["model"] == "/data/head"


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("vllm serve $(pick-model)/x\n", "a.sh", "line 1: the model is only known when it runs"),
        ("vllm serve $M\n", "a.sh", "line 1: .*M"),
        ("vllm serve M/N --speculative-config {bad json\n", "a.sh", "line 1: .*--speculative-config"),
        ("vllm serve M/N --port $(pick)\n", "a.sh", "line 1: only running it would tell what .*pick"),
        ("vllm serve M/N --port ${NOT_SET_ANYWHERE}\n", "a.sh", "NOT_SET_ANYWHERE"),
        ("services:\n  a:\n    image: vllm/vllm-openai:v0.31.0\n    command: [--model, M/N]\n", "a.yaml", "compose"),
        ("python -m dynamo.vllm --model M/N\n", "a.sh", "does not start dynamo"),
    ],
)  # fmt: skip
def test_what_cannot_be_started_is_said_before_anything_is_launched(tmp_path, text, name, said):
    with pytest.raises(UsageError, match=said):
        plan_tune(TuneOptions(recipe=str(written(tmp_path, text, name))))


def test_a_program_that_is_not_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    engine = recipe_engine(read_recipe(written(tmp_path, "vllm serve M/N\n")))
    with pytest.raises(EngineError, match="starts vllm, which is not here"):
        engine.prepare([BASELINE], lambda *_: None)


@pytest.mark.parametrize(
    ("line", "words", "env"),
    [
        ("vllm serve M/N", ("vllm", "serve", "M/N"), {}),
        ("exec vllm serve ~/m", ("vllm", "serve", "/home/me/m"), {}),
        ("A=$B vllm serve $PWD/m", ("vllm", "serve", f"{Path.cwd()}/m"), {"A": "2"}),
        ("M=x/y\nexport A=$B\nvllm serve $M", ("vllm", "serve", "x/y"), {"A": "2"}),
        ("source /v/bin/activate\nvllm serve m/n", ("vllm", "serve", "m/n"), {"VIRTUAL_ENV": "/v"} | PATHS),
    ],
)  # fmt: skip
def test_words_are_those_a_shell_would_give(tmp_path, line, words, env):
    recipe = read_recipe(written(tmp_path, line + "\n"))
    command = command_of(recipe, {"HOME": "/home/me", "B": "2", "PATH": "/bin"})
    assert (command.words, dict(command.env)) == (words, env)


def test_a_unit_gives_its_environment_and_folder(tmp_path):
    text = '[Service]\nEnvironment=A=1 "B=2 3"\nWorkingDirectory=/opt\nExecStart=/usr/bin/vllm serve M/N --port 8001\n'
    command = command_of(read_recipe(written(tmp_path, text, "a.service")), {})
    assert command.words == ("/usr/bin/vllm", "serve", "M/N", "--port", "8001")
    assert (dict(command.env), command.cwd) == ({"A": "1", "B": "2 3"}, Path("/opt"))


def test_an_activated_environment_is_printed_as_the_path_of_its_program(tmp_path):
    venv = stand_ins.install(tmp_path / "venv" / "bin")
    recipe = written(tmp_path, f"source {venv}/activate\nvllm serve M/N\n")
    assert recipe_engine(read_recipe(recipe)).command(BASELINE) == [f"{venv}/vllm", "serve", "M/N"]


def test_a_head_for_llamacpp_has_to_be_converted(tmp_path):
    head = tmp_path / "head"
    head.mkdir()
    engine = recipe_engine(read_recipe(written(tmp_path, "llama-server -m model.gguf --port 8080\n")))
    assert "only as GGUF" in engine.refusal(make_arm("eagle3", 3, str(head)))
    assert engine.refusal(make_arm("ngram", 3)) == ""
    argv, _, _ = engine._launch(make_arm("ngram", 3), 4321)
    assert "--metrics" in argv and argv[argv.index("--port") + 1] == "4321"
    assert "--spec-type" in argv


def test_a_key_that_the_engine_prints_is_kept_nowhere(tmp_path, monkeypatch):
    """The engine's own words may hold it in any form."""
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "vllm").write_text(f"#!/bin/sh\necho boom error: {KEY} is no valid key\nexit 3\n")
    (fake / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("surespec.tune.check_existing", lambda plan: ())
    recipe = written(tmp_path, f"vllm serve M/N --api-key {KEY}\n")
    judgement = tune(TuneOptions(recipe=str(recipe), out=tmp_path / "run", concurrency=(1,), num_prompts=2))
    assert judgement.verdict == "failed" and "boom" in judgement.why
    assert KEY not in judgement.model_dump_json()
    kept = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert KEY.encode() not in kept


def test_counts_of_tokens_are_no_secrets(tmp_path):
    text = "export HF_TOKEN='hf-abcdef-123456'\nvllm serve M/N --max-num-batched-tokens 131072 --api-key $MY_KEY\n"
    recipe = read_recipe(written(tmp_path, text))
    assert secrets_of(recipe, {"MY_KEY": "k-98765"}) == ("hf-abcdef-123456", "k-98765")
    assert recipe.flags["--max-num-batched-tokens"] == "131072"


def test_the_diff_of_apply_hides_secrets_and_the_file_keeps_them(tmp_path):
    recipe = written(tmp_path, f"vllm serve M/N --api-key {KEY}\n")
    config = '{"method":"ngram","num_speculative_tokens":3}'
    argv = [sys.executable, "-m", "surespec", "apply", "--recipe", str(recipe), "--speculative-config", config, "--yes"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0 and "ngram" in done.stdout and KEY not in done.stdout + done.stderr
    assert KEY in recipe.read_text() and "ngram" in recipe.read_text()


def test_the_folder_of_the_script_is_known(tmp_path):
    recipe = written(tmp_path, 'cd "$(dirname "$0")"\nvllm serve ./model\n')
    assert command_of(read_recipe(recipe), {}).cwd == tmp_path


def test_a_plan_says_what_is_missing_here(tmp_path):
    plan = plan_tune(TuneOptions(recipe=str(written(tmp_path, "/opt/nowhere/vllm serve M/N\n"))))
    assert any("starts /opt/nowhere/vllm, which is not here" in remark for remark in plan.remarks)
    with pytest.raises(ModelError, match="no drafter /nope"):
        plan_tune(TuneOptions(recipe=str(written(tmp_path, "vllm serve M/N\n")), eagle3_head="/nope"))


def test_a_managed_recipe_of_any_engine_says_its_own_command(tmp_path):
    recipe = written(tmp_path, "llama-server -m /m.gguf --port 8080\n")
    plan = plan_tune(TuneOptions(recipe=str(recipe), managed=True, endpoint="http://127.0.0.1:8080"))
    assert plan.commands["baseline"] == "llama-server -m /m.gguf --port 8080"
    assert "--spec-type" in plan.commands["ngram-k5"]


def test_the_kept_original_goes_with_undo_and_a_changed_recipe_is_said(programs, model, tmp_path):
    recipe = native(tmp_path, model)
    kept_run(tmp_path, recipe)
    before = recipe.read_bytes()
    apply_it = [sys.executable, "-m", "surespec", "apply", str(tmp_path / "run"), "--yes"]
    undo_it = [sys.executable, "-m", "surespec", "undo", str(tmp_path / "run")]
    done = subprocess.run(apply_it, capture_output=True, text=True)
    assert done.returncode == 0 and "changed since" not in done.stderr
    assert (tmp_path / "run" / "recipe" / "original").read_bytes() == before
    assert subprocess.run(undo_it, capture_output=True).returncode == 0
    assert recipe.read_bytes() == before and not (tmp_path / "run" / "recipe" / "original").exists()
    again = subprocess.run(undo_it, capture_output=True, text=True)
    assert again.returncode == 0 and "already" in again.stdout
    recipe.write_bytes(before.replace(b"2048", b"1024"))
    done = subprocess.run(apply_it, capture_output=True, text=True)
    assert done.returncode == 0 and "was changed since it was measured" in done.stderr


def test_plan_says_when_the_recipe_cannot_be_started_here(tmp_path):
    recipe = written(tmp_path, "vllm serve meta-llama/Llama-3.1-8B-Instruct\n")
    argv = [sys.executable, "-m", "surespec", "plan", "--recipe", str(recipe), "--offline"]
    here = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PATH": "/nowhere"})
    assert "starts vllm, which is not here" in here.stdout
    there = subprocess.run([*argv, "--device", "thor-t5000"], capture_output=True, text=True)
    assert "not here" not in there.stdout


def test_a_file_is_no_folder_for_a_run(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        plan_tune(TuneOptions(out=tmp_path / "file"))


def test_undo_takes_the_recipe_as_apply_does(tmp_path):
    recipe = written(tmp_path, "vllm serve M/N\n")
    write(plan_apply(recipe, {"method": "ngram", "num_speculative_tokens": 3}))
    run = [sys.executable, "-m", "surespec", "undo"]
    assert subprocess.run([*run, "--recipe", str(recipe)], capture_output=True).returncode == 0
    assert recipe.read_text() == "vllm serve M/N\n"
    for words in ([], [str(recipe), "--recipe", str(recipe)]):
        done = subprocess.run([*run, *words], capture_output=True, text=True)
        assert done.returncode == 2 and "name one thing" in done.stderr
