"""Programs that stand in for what is not on a test machine: a `vllm` and a `docker`, in a folder for PATH.

`vllm` takes vLLM's arguments and is surespec's embedded engine. `docker run` reads docker's arguments, starts the
image's `vllm` in a session of its own (as a container, it outlives its client) and stops it at SIGTERM; `docker rm -f`
removes it. What they were given is kept in `record.jsonl` beside them.
"""

import json
import sys
from pathlib import Path

VLLM = """
import json, os, sys
here = os.path.dirname(os.path.abspath(__file__))
argv = sys.argv[1:]
kept = {k: v for k, v in os.environ.items() if k.startswith(("MARK_", "HF_", "VLLM_"))}
with open(os.path.join(here, "record.jsonl"), "a") as file:
    file.write(json.dumps({"vllm": argv, "env": kept, "cwd": os.getcwd()}) + "\\n")
if argv[0] == "serve":
    argv = argv[1:]
words, out = list(argv), []
if words and not words[0].startswith("-"):
    out += ["--model", words.pop(0)]
while words:
    flag, value = words.pop(0), words.pop(0)
    if flag == "--gpu-memory-utilization":
        continue
    if flag not in ("--model", "--port", "--host", "--max-model-len", "--speculative-config"):
        sys.exit(f"vllm: error: unrecognized arguments: {flag}")
    out += [flag, value]
os.execv(PYTHON, [PYTHON, "-m", "surespec", "serve", *out])
"""

DOCKER = """
import json, os, signal, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
argv = sys.argv[1:]
with open(os.path.join(here, "record.jsonl"), "a") as file:
    file.write(json.dumps({"docker": argv}) + "\\n")
place = lambda name: os.path.join(here, name + ".pid")
if argv[0] == "rm":
    try:
        os.killpg(int(open(place(argv[-1])).read()), signal.SIGKILL)
        os.remove(place(argv[-1]))
    except OSError:
        sys.exit(1)
    sys.exit(0)
if argv[0] != "run":
    sys.exit(0)
name, ports, host, words, env = "x", {}, False, argv[1:], {"PATH": os.environ["PATH"]}
env |= {k: os.environ[k] for k in ("PYTHONPATH", "HOME") if k in os.environ}
while words[0].startswith("-"):
    option = words.pop(0)
    if option == "--rm":
        continue
    value = words.pop(0)
    if option == "--name":
        name = value
    elif option == "-p":
        address, outer, inner = value.split(":")
        ports[inner] = (address, outer)
    elif option in ("-e", "--env"):
        key, equals, text = value.partition("=")
        env[key] = text if equals else os.environ.get(key, "")
    elif option == "--network":
        host = value == "host"
image, words = words[0], words[1:]
if not host:  # the container's port is reached by the published one
    at = words.index("--port") + 1 if "--port" in words else None
    address, outer = ports[words[at] if at else "8000"]
    words = [w for i, w in enumerate(words) if at is None or i not in (at - 1, at)]
    words = [w for i, w in enumerate(words) if not (w == "--host" or (i and words[i - 1] == "--host"))]
    words += ["--port", outer, "--host", address]
box = subprocess.Popen([os.path.join(here, "vllm"), *words], env=env, start_new_session=True)
with open(place(name), "w") as file:
    file.write(str(box.pid))
signal.signal(signal.SIGTERM, lambda *_: os.killpg(box.pid, signal.SIGTERM))
code = box.wait()
try:
    os.remove(place(name))
except OSError:
    pass
sys.exit(code if code >= 0 else 128 - code)
"""


def install(folder: Path) -> Path:
    """Write both into ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, code in (("vllm", VLLM), ("docker", DOCKER)):
        (folder / name).write_text(f"#!{sys.executable}\nPYTHON = {sys.executable!r}\n{code}")
        (folder / name).chmod(0o755)
    return folder


def record(folder: Path) -> list[dict]:
    """What they were given, in order."""
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
