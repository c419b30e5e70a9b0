"""A server that stands in for `surespec serve` in the fault suite: ``fault_server.py FOLDER serve's arguments``.

Its answers are fixed and its speed is that of its sleeps: 10 tokens in 5 chunks, 10 ms each without speculation and 1 ms
with it. A child makes the tokens, as engines have workers; without it the server ends. ``server.json`` in the folder
names one moment (life, where, number) and what happens in it: ``meet`` (wait for the test), ``reset`` (the connection).
"""

import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FOLDER = sys.argv[1]
ARGUMENTS = sys.argv[2:]
PORT = int(ARGUMENTS[ARGUMENTS.index("--port") + 1])
DELAY_S = 0.001 if "--speculative-config" in ARGUMENTS else 0.010
LIFE = len([name for name in os.listdir(FOLDER) if name.startswith("life-")])  # noqa: PTH208
with open(os.path.join(FOLDER, f"life-{LIFE}"), "w") as file:  # noqa: PTH118, PTH123
    json.dump({"pid": os.getpid(), "port": PORT}, file)
try:
    with open(os.path.join(FOLDER, "server.json")) as file:  # noqa: PTH118, PTH123
        PLAN = json.load(file)
except FileNotFoundError:
    PLAN = {}
lock = threading.Lock()
requests = 0


def at(where: str, number: int = 0) -> str:
    """What to do at this moment of this life; empty nearly always."""
    first, last = PLAN.get("numbers", [0, 0])
    if PLAN.get("where") != where or PLAN.get("life") not in (LIFE, -1) or not first <= number <= last:
        return ""
    return PLAN["action"]


def meet() -> None:
    """As in ``sitecustomize``."""
    with open(os.path.join(FOLDER, "reached"), "w") as file:  # noqa: PTH118, PTH123
        file.write(str(os.getpid()))
    deadline = time.monotonic() + 60
    while not os.path.exists(os.path.join(FOLDER, "go")) and time.monotonic() < deadline:  # noqa: PTH110, PTH118
        time.sleep(0.01)


def start_worker() -> tuple[int, int]:
    """The child, and the pipes to it: a byte in, a byte out."""
    inward, outward = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(inward[1])
        os.close(outward[0])
        if PLAN.get("stray"):
            os.setsid()  # a worker that leaves the group, and that does not notice the end of its server
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                if os.read(inward[0], 1):
                    os.write(outward[1], b"t")
                else:
                    time.sleep(0.05)
        while os.read(inward[0], 1):
            os.write(outward[1], b"t")
        os._exit(0)
    os.close(inward[0])
    os.close(outward[1])
    with open(os.path.join(FOLDER, f"worker-{LIFE}"), "w") as file:  # noqa: PTH118, PTH123
        file.write(str(child))
    return inward[1], outward[0]


def token() -> None:
    """One chunk's work by the child; without it the server is of no use, and ends."""
    with lock:
        try:
            os.write(ASK, b"?")
            answer = os.read(ANSWER, 1)
        except OSError:
            answer = b""
    if not answer:
        print("EngineDeadError: the worker is gone", flush=True)
        os._exit(1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = json.dumps({"data": [{"id": "m"}]}).encode() if self.path == "/v1/models" else b""
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        global requests
        with lock:
            requests += 1
            number = requests
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for i in range(5):
            if i == 2 and (action := at("request", number)):
                if action == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    return
                meet()
            token()
            time.sleep(DELAY_S)
            chunk = {"choices": [{"delta": {"content": f"w{i} "}, "finish_reason": "length" if i == 4 else None}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 10}}
        self.wfile.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        self.close_connection = True

    def finish(self):
        try:
            super().finish()
        except (OSError, ValueError):
            return

    def log_message(self, *_):
        return


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_):
        return


def stop(*_):
    if at("stop"):
        meet()
    os._exit(0)


signal.signal(signal.SIGTERM, stop)
ASK, ANSWER = start_worker()
print(f"stand-in, life {LIFE}, port {PORT}", flush=True)
if at("start"):
    meet()
try:
    Server(("127.0.0.1", PORT), Handler).serve_forever()
except OSError as error:
    print(f"OSError: [Errno {error.errno}] {error.strerror}: port {PORT}", flush=True)
    sys.exit(1)
