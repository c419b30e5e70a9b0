"""What a hostile or careless client can do to the embedded server, over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from aiohttp import web

from surespec.local import connections
from surespec.local.chat import ChatTemplate
from surespec.local.server import bind
from toy import make_llama

SRC = Path(connections.__file__).parents[1]


async def site(**limits):
    """A guarded site with one route, its port, and its runner."""

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    guarded = connections.GuardedSite(runner, bind("127.0.0.1", 0), **limits)
    await guarded.start()
    return runner, guarded, runner.addresses[0][1]


async def ask(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send the pieces, and read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


CLOSING = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def test_a_head_that_never_ends_is_cut_off_and_frees_its_place():
    runner, guarded, port = await site(head_timeout_s=0.3)
    try:
        assert await ask(port) == b""
        assert await ask(port, b"GET / HTTP/1.1\r\n", b"Host: x\r\n", b"X-Slow: ", pause_s=0.2) == b""
        assert not guarded.open
        assert b"hello" in await ask(port, CLOSING)
    finally:
        await runner.cleanup()


async def test_a_head_in_pieces_is_understood_and_its_timer_ends():
    runner, _, port = await site(head_timeout_s=0.6)
    try:
        pieces = [CLOSING[:30], CLOSING[30:-3], CLOSING[-3:-1], CLOSING[-1:]]
        assert b"hello" in await ask(port, *pieces, pause_s=0.02)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):  # kept alive beyond the timer of the first head
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"hello")
            await asyncio.sleep(0.7)
        writer.close()
    finally:
        await runner.cleanup()


async def test_too_many_connections_are_refused_with_a_503_and_later_ones_served():
    runner, _, port = await site(max_connections=3, head_timeout_s=30)
    try:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await asyncio.sleep(0.05)
        answer = await ask(port)
        assert answer.startswith(b"HTTP/1.1 503")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "overloaded_error"
        for _, writer in held:
            writer.close()
        await asyncio.sleep(0.1)
        assert b"hello" in await ask(port, CLOSING)
    finally:
        await runner.cleanup()


async def test_huge_heads_are_refused():
    runner, _, port = await site()
    try:
        many = b"".join(b"X-%d: y\r\n" % i for i in range(50_000))
        for head in (
            b"GET /" + b"a" * 100_000,
            b"GET / HTTP/1.1\r\nX: " + b"a" * 1_000_000,
            b"GET / HTTP/1.1\r\n" + many,
        ):
            assert b"200 OK" not in await ask(port, head + b"\r\n\r\n")
        assert b"hello" in await ask(port, CLOSING)
    finally:
        await runner.cleanup()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """``surespec serve`` of a toy with a key from a file: its port, its process, the key."""
    folder = tmp_path_factory.mktemp("served")
    model, key = make_llama(folder / "toy"), folder / "key"
    key.write_text("planted-key-1234\n")
    command = [
        sys.executable,
        "-m",
        "surespec",
        "serve",
        "--model",
        str(model),
        "--served-model-name",
        "toy",
        "--port",
        "0",
    ]
    process = subprocess.Popen([*command, "--api-key-file", str(key)], stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if found := re.search(r"serving toy on http://127\.0\.0\.1:(\d+)", line):
                yield int(found[1]), process
                break
        else:
            raise AssertionError("it never became ready")
    finally:
        process.kill()
        process.wait()


def post(port: int, **headers: str) -> int:
    body = json.dumps({"model": "toy", "prompt": "a b", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


KEY = {"Authorization": "Bearer planted-key-1234", "Content-Type": "application/json"}


def test_a_page_of_another_site_is_refused_even_with_the_key(server):
    port, _ = server
    assert post(port, **KEY) == 200
    assert post(port, **KEY, Origin="http://localhost:3000") == 200
    for origin in ("http://evil.example:8000", "null", "http://[bad", "http://127.0.0.1.evil.example"):
        assert post(port, **KEY, Origin=origin) == 403
    assert post(port, **{**KEY, "Content-Type": "text/plain"}) == 415  # what a form of another site can send unasked


def test_the_key_is_asked_for_and_stands_in_no_list_of_processes(server):
    port, process = server
    assert post(port, **{"Content-Type": "application/json"}) == 401
    assert post(port, **{**KEY, "Authorization": "Bearer wrong"}) == 401
    assert b"planted-key" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


def serve(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "surespec", "serve", "--model", "no-such", *arguments], capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def test_a_key_on_the_command_line_is_warned_of():
    assert "list of processes" in serve("--api-key", "k").stderr


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff\xfe", b"line\nline"])
def test_a_bad_key_file_is_a_usage_error(tmp_path, content):
    file = tmp_path / "key"
    file.write_bytes(content)
    done = serve("--api-key-file", str(file))
    assert done.returncode == 2
    assert str(file) in done.stderr
    assert "Traceback" not in done.stderr


def test_another_address_without_a_key_is_warned_of(tmp_path):
    model = make_llama(tmp_path / "toy")
    command = [sys.executable, "-m", "surespec", "serve", "--model", str(model), "--port", "0", "--host", "0.0.0.0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        for line in process.stderr:
            said += line
            if "serving" in line:
                break
        assert "warning: 0.0.0.0 is not a loopback address" in said
        assert "--api-key-file" in said
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self._TemplateReference__context }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(template):
    from surespec.errors import ConfigError

    try:
        text = ChatTemplate(template).render([{"role": "user", "content": "hi"}])
    except ConfigError:
        return
    assert not re.search(r"uid=|root:|<class|module|function", text)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10000000000) %}x{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{{ 'aaaaaaaaaa' * 999999 }}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%099999999999d' % 1 }}",
        "{{ 'x'.center(10000000000) }}",
        "{{ '{:>9999999999}'.format('x') }}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
        "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_without_end_is_refused(template):
    from surespec.errors import ConfigError

    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate(template).render([])


def test_no_code_of_a_model_is_ever_run():
    """No remote code, no pickle: neither is named in the source but in the sentence that refuses it."""
    forbidden = re.compile(
        r"trust_remote_code\s*=\s*True|import pickle|pickle\.load|torch\.load|\beval\(|\bexec\(|shell=True"
    )
    for file in SRC.rglob("*.py"):
        assert not forbidden.search(file.read_text(encoding="utf-8")), file


def test_sockets_are_bound_to_loopback_by_default():
    with bind("127.0.0.1", 0) as listener:
        assert isinstance(listener, socket.socket)
        assert listener.getsockname()[0] == "127.0.0.1"
