"""Dynamo's quick start with speculation, step by step, for what was planned (rule D3 with today's Dynamo). Pure."""

from __future__ import annotations

from surespec.dialects.base import compact_json
from surespec.dialects.dynamo import GRAPH_FILE, SECRET_NAME, WORKER_IMAGES, infrastructure_yaml
from surespec.plan.gates import Place
from surespec.plan_nouns import GuideStep, PlannedArm

COMPOSE_FILE = "surespec-dynamo-services.yaml"


def quick_start(place: Place, arms: tuple[PlannedArm, ...]) -> tuple[GuideStep, ...]:
    """The steps from nothing to an answer, with the best arm; empty for another engine, or where no arm fits."""
    if place.runtime.engine != "dynamo" or not arms or not arms[0].fits:
        return ()
    best, kubernetes = arms[0], place.options.kubernetes
    gated = place.model.gated or bool(best.drafter and best.drafter.gated)
    steps = [] if kubernetes else [_infrastructure()]
    if gated:
        steps.append(_token(place, kubernetes=kubernetes))
    if not kubernetes:
        steps.append(_container(place, gated=gated))
    steps += [_launch(best, kubernetes=kubernetes), _question(place, kubernetes=kubernetes), _proof(place)]
    return tuple(steps)


def _infrastructure() -> GuideStep:
    return GuideStep(
        title="Infrastructure services: none on one machine",
        text=f"# for several machines, with this file: docker compose -f {COMPOSE_FILE} up -d\n{infrastructure_yaml()}",
        why="Discovery by files needs neither etcd nor NATS. With them leave out --discovery-backend file, and set "
        "ETCD_ENDPOINTS and NATS_SERVER where they are not on this machine.",
    )


def _token(place: Place, *, kubernetes: bool) -> GuideStep:
    keys = "HF_TOKEN and HUGGING_FACE_HUB_TOKEN"
    if kubernetes:
        text = (
            "read -rs HF_TOKEN\n"
            f'printf \'HF_TOKEN=%s\\nHUGGING_FACE_HUB_TOKEN=%s\\n\' "$HF_TOKEN" "$HF_TOKEN" | '
            f"kubectl create secret generic {SECRET_NAME} --from-env-file=/dev/stdin"
        )
        why = f"{place.model.id} is gated. The graph refers to this secret; it holds no token itself."
    else:
        text = 'read -rs HF_TOKEN; export HF_TOKEN HUGGING_FACE_HUB_TOKEN="$HF_TOKEN"'
        why = f"{place.model.id} is gated: accept its license on its page first. Typed so, no token is in the history."
    return GuideStep(title=f"Hugging Face token ({keys})", text=text, why=why)


def _container(place: Place, *, gated: bool) -> GuideStep:
    image = f"{WORKER_IMAGES[place.runtime.host_engine]}:{place.runtime.version or '1.6.1'}"
    names = " -e HF_TOKEN -e HUGGING_FACE_HUB_TOKEN" if gated else ""
    return GuideStep(
        title="The worker's container",
        text=f"docker run -it --rm --gpus all --network host --ipc host{names} "
        f"-v ~/.cache/huggingface:/root/.cache/huggingface {image} bash",
        why="Variables are passed by name, so no token stands in a process list. All that follows runs in it. "
        "Not verified on hardware.",
    )


def _launch(best: PlannedArm, *, kubernetes: bool) -> GuideStep:
    spoken = f"Frontend and worker with {best.name}"
    if kubernetes:
        return GuideStep(title=spoken, text=best.command, why=f"With the file {GRAPH_FILE} printed above.")
    config = best.speculative_config
    return GuideStep(
        title=spoken,
        text=best.command,
        why=f"k = {config.get('num_speculative_tokens')} and the memory share are this plan's, for this device; the "
        "guide's 16 GB GPU is too small for an 8B model in 16 bit with a head.",
    )


def _question(place: Place, *, kubernetes: bool) -> GuideStep:
    body = compact_json({"model": place.model.id, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64})
    address = f"http://{place.options.host}:{place.options.port}"
    forward = f"kubectl port-forward service/NAME-frontend {place.options.port}:8000 &\n" if kubernetes else ""
    return GuideStep(
        title="A first answer",
        text=f"{forward}curl {address}/health\n"
        f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        why="/health lists every worker; a model is served once /v1/models names it.",
    )


def _proof(place: Place) -> GuideStep:
    return GuideStep(
        title="Is it faster?",
        text=f"surespec tune --engine dynamo --model {place.model.id}",
        why="Acceptance is on the worker's system port (DYN_SYSTEM_PORT), not the frontend; alone it proves nothing.",
    )
