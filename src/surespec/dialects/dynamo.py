"""NVIDIA Dynamo: frontend and worker for one machine (file discovery), or a DynamoGraphDeployment (v1beta1)."""

from __future__ import annotations

import re
from typing import Any

from surespec.dialects import sglang, trtllm, vllm
from surespec.dialects.base import Command, Deployment, shell_line, to_yaml

GRAPH_FILE = "surespec-dynamo.yaml"
_SYSTEM_PORT = "8081"
SECRET_NAME = "hf-token-secret"
WORKER_IMAGES = {
    "vllm": "nvcr.io/nvidia/ai-dynamo/vllm-runtime",
    "sglang": "nvcr.io/nvidia/ai-dynamo/sglang-runtime",
    "trtllm": "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime",
}


def worker_argv(d: Deployment, *, discovery: bool) -> list[str]:
    """The worker's arguments, in the dialect of the engine inside."""
    engine = d.runtime.host_engine
    model = d.model.path or d.model.id
    backend = ["--discovery-backend", "file"] if discovery else []
    if engine == "sglang":
        return ["python3", "-m", "dynamo.sglang", "--model-path", model, *backend, *sglang.flags(d)]
    if engine == "trtllm":
        extra = ["--extra-engine-args", trtllm.CONFIG_FILE]
        return ["python3", "-m", "dynamo.trtllm", "--model-path", model, *backend, *trtllm.flags(d), *extra]
    return ["python3", "-m", "dynamo.vllm", "--model", model, *backend, *vllm.flags(d)]


def graph(d: Deployment) -> dict[str, Any]:
    """The DynamoGraphDeployment: a frontend and one worker with as many GPUs as tensor parallelism asks for."""
    name = re.sub(r"[^a-z0-9-]+", "-", d.model.id.rsplit("/", 1)[-1].lower()).strip("-")[:40] or "model"
    image = f"{WORKER_IMAGES.get(d.runtime.host_engine, WORKER_IMAGES['vllm'])}:{d.runtime.version or '1.6.1'}"
    secret = {"secretRef": {"name": SECRET_NAME}}
    worker = worker_argv(d, discovery=False)
    main = {
        "name": "main",
        "image": image,
        "command": worker[:3],
        "args": worker[3:],
        "env": [{"name": "DYN_SYSTEM_PORT", "value": _SYSTEM_PORT}],
        "resources": {"limits": {"nvidia.com/gpu": str(d.tensor_parallel)}},
    }
    if d.model.gated:
        main["envFrom"] = [secret]
    front = {"name": "main", "image": image}
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name},
        "spec": {
            "components": [
                {
                    "name": "Frontend",
                    "type": "frontend",
                    "replicas": 1,
                    "podTemplate": {"spec": {"containers": [front]}},
                },
                {"name": "Worker", "type": "worker", "replicas": 1, "podTemplate": {"spec": {"containers": [main]}}},
            ]
        },
    }


def infrastructure_yaml() -> str:
    """A compose file with etcd and NATS (with its stream store), on the loopback interface. Not run here."""
    etcd = ["etcd", "--data-dir", "/data", "--advertise-client-urls", "http://127.0.0.1:2379"]
    etcd += ["--listen-client-urls", "http://0.0.0.0:2379"]
    services = {
        "etcd": {"image": "quay.io/coreos/etcd:v3.5.21", "command": etcd, "ports": ["127.0.0.1:2379:2379"]},
        "nats": {"image": "nats:2.11", "command": ["-js"], "ports": ["127.0.0.1:4222:4222"]},
    }
    return to_yaml({"services": services}) + "\n"


def render(d: Deployment) -> Command:
    """A graph for Kubernetes, or the two commands of one machine, without etcd or NATS (D3)."""
    files = {}
    if d.runtime.host_engine == "trtllm":
        files[trtllm.CONFIG_FILE] = trtllm.config_yaml(d)
    if d.kubernetes:
        argv = ("kubectl", "apply", "-f", GRAPH_FILE)
        notes = (
            ["a gated model needs the secret hf-token-secret with HF_TOKEN and HUGGING_FACE_HUB_TOKEN"]
            if d.model.gated
            else []
        )
        return Command(argv, shell_line(argv), {**files, GRAPH_FILE: to_yaml(graph(d)) + "\n"}, tuple(notes))
    worker = worker_argv(d, discovery=True)
    front = [
        "python3",
        "-m",
        "dynamo.frontend",
        "--http-host",
        d.host,
        "--http-port",
        str(d.port),
        "--discovery-backend",
        "file",
    ]
    text = f"{shell_line(front)} &\nDYN_SYSTEM_PORT={_SYSTEM_PORT} {shell_line(worker)}"
    return Command(tuple(worker), text, files)
