"""``surespec doctor``: what is missing is found, with a command that mends it; what is there is not complained of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surespec import doctor
from surespec.errors import UsageError
from surespec.fetch import known_models
from surespec.plan_nouns import GIB
from surespec.probe import simulated_device


@pytest.fixture(autouse=True)
def empty_machine(tmp_path, monkeypatch):
    """No engine, no docker, no token, an empty cache, and no other server."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("SURESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SURESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in [n for n in os.environ if n in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") or n.endswith("_PYTHON")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("SURESPEC_LLAMACPP_PROGRAM", raising=False)
    monkeypatch.setattr(doctor, "find_existing", tuple)


def by_name(found: doctor.Diagnosis) -> dict[str, doctor.Check]:
    return {check.name: check for check in found.checks}


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_an_empty_machine_can_still_run_the_embedded_engine():
    found = doctor.examine()
    checks = by_name(found)
    assert found.exit_code == 0
    assert checks["packages"].status == "ok"
    assert checks["small model"].fix == "surespec fetch smollm2-135m"
    assert checks["vLLM"].status == "absent"
    assert checks["Hugging Face"].status == "absent"
    assert "PATH" in checks["command"].fix or checks["command"].fix.startswith("python3 -m venv")
    assert all(check.fix for check in found.checks if check.status == "missing")


def test_an_engine_that_is_asked_for_is_required():
    found = doctor.examine("vllm")
    assert found.exit_code == 1
    assert by_name(found)["vLLM"].status == "missing"
    assert by_name(found)["vLLM"].fix == "make engine-vllm"


def test_what_is_there_is_found(tmp_path, monkeypatch):
    program(tmp_path / "bin", "docker", 'if [ "$1" = version ]; then echo 27.0.1; fi')
    program(tmp_path / "bin", "llama-server", "printf '%s\\n' '--host HOST  address' '--port PORT  port'")
    monkeypatch.setenv("HF_TOKEN", "hf_planted_secret")
    name, asset = next(iter(known_models().items()))
    model = tmp_path / "cache" / name / asset.file
    model.parent.mkdir(parents=True)
    with model.open("wb") as file:
        file.truncate(asset.size_bytes)
    found = doctor.examine("llamacpp")
    checks = by_name(found)
    assert found.exit_code == 0
    assert checks["containers"].found == "docker 27.0.1"
    assert checks["llama.cpp"].found.endswith("llama-server")
    assert checks["small model"].status == checks["Hugging Face"].status == "ok"
    assert "hf_planted_secret" not in found.model_dump_json()


def test_a_model_cut_short_is_not_there(tmp_path):
    name, asset = next(iter(known_models().items()))
    model = tmp_path / "cache" / name / asset.file
    model.parent.mkdir(parents=True)
    model.write_bytes(b"half")
    assert by_name(doctor.examine())["small model"].status == "absent"


def test_docker_that_does_not_answer(tmp_path):
    program(tmp_path / "bin", "docker", "exit 1")
    check = by_name(doctor.examine())["containers"]
    assert check.status == "warning"
    assert check.fix.startswith("sudo ")


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "_IMPORTS", ("numpy", "no_such_package_here"))
    found = doctor.examine()
    assert found.exit_code == 1
    assert by_name(found)["packages"].fix.endswith("--force-reinstall no_such_package_here")


def test_no_room_is_required_to_be_mended(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10_000_000})())
    found = doctor.examine()
    assert found.exit_code == 1
    assert "SURESPEC_CACHE" in by_name(found)["disk"].fix


@pytest.mark.parametrize(
    ("sku", "l4t", "image"),
    [("thor-t5000", "38.4", "vllm/vllm-openai:latest"), ("orin-agx-64gb", "36.4.3", "nvidia-ai-iot/vllm")],
)
def test_a_jetson_is_told_its_image_and_its_power_mode(sku, l4t, image, monkeypatch):
    device = simulated_device(sku, l4t).model_copy(update={"power_mode": "30W", "available_bytes": GIB})
    monkeypatch.setattr(doctor, "find_device", lambda: device)
    checks = doctor.examine("vllm").checks
    assert image in next(c.fix for c in checks if c.name == "vLLM")
    assert next(c for c in checks if c.name == "device").fix == "sudo nvpmodel -m 0"
    assert next(c for c in checks if c.name == "memory").status == "warning"


def test_an_unknown_engine_is_a_usage_error():
    with pytest.raises(UsageError, match="Known: local, vllm"):
        doctor.examine("exllama")
