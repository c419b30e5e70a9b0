"""The pages that are written from the code are up to date, and the skill is one by the public conventions."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import typer
from ruamel.yaml import YAML

from surespec.cli import app

ROOT = Path(__file__).parents[1]
SKILL = ROOT / "skills" / "surespec" / "SKILL.md"
COMMANDS = typer.main.get_command(app).commands


def test_the_reference_is_up_to_date():
    """After a change of flags: ``python tools/make_reference.py``."""
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "tools" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "reference.md").read_text("utf-8") == module.page()


def test_the_skill_has_a_valid_head():
    """name: 1-64 of a-z, 0-9 and hyphens, that of its folder; description: 1-1024 characters; no other keys."""
    _, head, body = SKILL.read_text("utf-8").split("---\n", 2)
    fields = YAML(typ="safe").load(head)
    assert set(fields) <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert fields["name"] == SKILL.parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert 1 <= len(fields["description"]) <= 1024
    assert "Use when" in fields["description"]
    assert len(body.splitlines()) < 500


@pytest.mark.parametrize("line", re.findall(r"`(surespec [^`]+)`", SKILL.read_text("utf-8")))
def test_the_skill_names_only_commands_and_flags_that_exist(line):
    words = line.replace("\n", " ").split()
    command = COMMANDS[words[1]]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known


def test_every_command_of_the_contract_that_is_built_has_help():
    contract = "probe plan fetch serve bench judge tune schedule apply undo report explain doctor schema"
    assert set(contract.split()) <= set(COMMANDS)
    assert all(command.help for command in COMMANDS.values())
