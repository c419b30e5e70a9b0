"""Planted tokens, in every place where users have them; nothing that a run leaves or shows may hold one."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import stand_ins
import toy
from serving import AppInThread, FaultyEngine

# By the name of the variable, by the form of the value, or by neither.
PLANTED = {
    "HF_TOKEN": "hf_PlantedPlantedPlantedPlanted01",
    "HUGGING_FACE_HUB_TOKEN": "planted-hub-token-02",
    "OPENAI_API_KEY": "sk-planted-planted-planted-03",
    "SURESPEC_API_KEY": "planted-surespec-04",
    "VLLM_API_KEY": "planted-vllm-key-05",
    "NGC_API_KEY": "nvapi-planted-planted-planted-06",
    "AWS_SECRET_ACCESS_KEY": "planted/aws+secret07",
    "REGISTRY_PASSWORD": "planted password 08",
}
IN_RECIPE = {"--api-key": "planted-in-recipe-09", "HF_TOKEN": "hf_plantedInTheRecipe000010"}
LOUD = """
import os, sys
print("arguments:", sys.argv)
print("environment:", dict(os.environ))
for name, value in os.environ.items():
    print(f"checking {value} ... invalid")
    print(f'{{"{name}": "{value}"}}', flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return toy.make_llama(tmp_path_factory.mktemp("toy") / "model", max_position_embeddings=2048)


@pytest.fixture
def environment(tmp_path):
    """A vLLM that prints all it knows before it serves."""
    folder = stand_ins.install(tmp_path / "bin")
    program = folder / "vllm"
    head, rest = program.read_text().split("\n", 1)
    kept = rest.replace("os.execv(PYTHON", "os.environ.pop('SURESPEC_API_KEY', None)\nos.execv(PYTHON")
    kept = kept.replace("words, out = list(argv), []", "argv = without_key(argv)\nwords, out = list(argv), []")
    cut = "def without_key(argv):\n    at = argv.index('--api-key') if '--api-key' in argv else len(argv)\n"
    program.write_text(f"{head}\n{LOUD}\n{cut}    return argv[:at] + argv[at + 2:]\n{kept}")
    return {
        **os.environ, **PLANTED, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path), "TMPDIR": str(tmp_path),
    }  # fmt: skip


class Watch:
    """Reads the list of processes while a command runs, as any user of the machine can."""

    def __init__(self, pid: int) -> None:
        self.seen: set[str] = set()
        self._root, self._over = psutil.Process(pid), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.is_set():
            try:
                family = [self._root, *self._root.children(recursive=True)]
            except psutil.Error:
                return
            for process in family:
                try:
                    self.seen.add("\0".join(process.cmdline()))
                except psutil.Error:
                    continue
            time.sleep(0.05)

    def close(self) -> set[str]:
        self._over.set()
        self._thread.join()
        return self.seen


def run(*words, env, code=(0,)):
    """The output, and every command line that was seen."""
    with subprocess.Popen(
        [sys.executable, "-m", "surespec", *map(str, words)],
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        watch = Watch(process.pid)
        said = process.communicate(timeout=100)[0]
    assert process.returncode in code, said
    assert "Traceback" not in said
    return said, watch.close()


def files_of(folder: Path):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def clean(what, texts, tokens):
    for place, text in texts:
        data = text if isinstance(text, bytes) else text.encode()
        for name, token in tokens.items():
            assert token.encode() not in data, f"{what}: the value of {name} stands in {place}"


TOKENS = {**PLANTED, **{f"the recipe's {name}": value for name, value in IN_RECIPE.items()}}


@pytest.mark.parametrize("form", ["native", "docker"])
def test_nothing_of_a_tune_holds_a_token(environment, model, tmp_path, form):
    recipe = tmp_path / "serve.sh"
    key, token = IN_RECIPE["--api-key"], IN_RECIPE["HF_TOKEN"]
    if form == "native":
        text = f"export HF_TOKEN={token}\nvllm serve {model} --port 8765 --max-model-len 2048 --api-key {key}\n"
    else:
        text = (
            f"docker run -d -p 8765:8000 -e HF_TOKEN={token} -e OPENAI_API_KEY vllm/vllm-openai:v0.31.0"
            f" {model} --max-model-len 2048 --api-key {key}\n"
        )
    recipe.write_text(text)
    out = tmp_path / "run"
    said, seen = run(
        "tune", "--recipe", recipe, "--concurrency", "1", "--prompts", "copy", "--num-prompts", "2",
        "--output-len", "16", "--out", out, "--budget", "5s", env=environment, code=(0, 10, 11, 12),
    )  # fmt: skip
    logs = list(out.rglob("*.log"))
    assert logs and any("checking" in path.read_text() for path in logs), "the server did not say what it knows"
    assert any("vllm" in line or "surespec" in line for line in seen)
    clean("tune", [("its output", said), *((f"the command line {line[:80]}", line) for line in seen)], TOKENS)
    clean("bundle", files_of(out).items(), TOKENS)
    for words in (
        ["report", out],
        ["schedule", out],
        ["tune", "--recipe", recipe, "--dry-run", "--json", "--out", "x"],
    ):
        said, seen = run(*words, env=environment, code=(0, 1, 2, 10, 11))
        clean(words[0], [("its output", said), *((line[:80], line) for line in seen)], TOKENS)
    clean("bundle after report", files_of(out).items(), TOKENS)
    config = '{"method":"ngram","num_speculative_tokens":3}'
    said, _ = run("apply", "--recipe", recipe, "--speculative-config", config, "--yes", env=environment)
    clean("apply", [("its output", said)], TOKENS)
    assert key in recipe.read_text() and token in recipe.read_text() and "ngram" in recipe.read_text()
    said, _ = run("plan", "--recipe", recipe, "--device", "thor-t5000", "--offline", env=environment, code=(0, 10))
    assert "recipe serve.sh" in said
    clean("plan", [("its output", said)], TOKENS)


def test_a_failed_launch_says_no_token(environment, model, tmp_path):
    program = tmp_path / "bin" / "vllm"
    program.write_text(f"#!{sys.executable}\n{LOUD}\nsys.exit('error: ' + ' '.join(os.environ.values()))\n")
    recipe = tmp_path / "serve.sh"
    recipe.write_text(f"vllm serve {model} --api-key {IN_RECIPE['--api-key']}\n")
    out = tmp_path / "run"
    said, _ = run("tune", "--recipe", recipe, "--num-prompts", "2", "--out", out, env=environment, code=range(1, 20))
    clean("tune", [("its output", said)], TOKENS)
    clean("bundle", files_of(out).items(), TOKENS)


def test_a_server_that_repeats_the_key_is_not_quoted(tmp_path):
    """Servers answer with the key that was sent; the user and password of a URL are theirs too."""
    from aiohttp import web

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response(
            {"error": {"message": f"no such key: {request.headers.get('Authorization')}"}}, status=401
        )

    class Refusing(AppInThread):
        def __init__(self) -> None:
            super().__init__(FaultyEngine([]), None)
            self.app = web.Application()
            self.app.router.add_route("*", "/{path:.*}", refuse)
            self._runner = web.AppRunner(self.app, access_log=None)

    env = {**os.environ, **PLANTED}
    with Refusing() as server:
        for url in (server.url, server.url.replace("://", "://joe:planted-in-url-11@")):
            tokens = {**TOKENS, "the URL": "planted-in-url-11"}
            for words in (["bench", "--endpoint", url], ["probe", "--endpoint", url]):
                said, _ = run(*words, env=env, code=(1,))
                assert "401" in said, "the server was asked"
                clean(" ".join(words[:2]), [("its output", said)], tokens)


@pytest.mark.parametrize("url", ["ftp://joe:planted-in-url-11@host", "http://joe:planted-in-url-11@host:port"])
def test_a_wrong_url_is_said_without_its_password(url):
    for words in (["bench", "--endpoint", url], ["probe", "--endpoint", url]):
        said, _ = run(*words, env=dict(os.environ), code=(2,))
        assert "planted" not in said and "--endpoint" in said


def test_doctor_says_which_keys_are_set_and_not_what_they_are(environment):
    said, _ = run("doctor", "--json", env=environment, code=range(20))
    clean("doctor", [("its output", said)], TOKENS)
    json.loads(said)
