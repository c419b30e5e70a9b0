"""A bundle on disk: whole files, resumable launches, one user at a time."""

import json
import subprocess
import sys

import pytest

from surespec.core import Arm, Judgement, Launch, Run, Trace
from surespec.errors import BundleError
from surespec.store import Bundle

TRACES = tuple(
    Trace(prompt_id=f"p{i}", category="chat", start_s=i, ok=True, output_tokens=10, tpot_ms=20.0, text="äöü\n\u2028")
    for i in range(3)
)
RUN = Run(
    concurrency=1, num_requests=3, failed=0, duration_s=1, output_tokens=30, throughput_tok_s=30, ttft_ms_p50=1,
    ttft_ms_p99=1, tpot_ms_p50=20, tpot_ms_p99=20, itl_ms_p50=1, itl_ms_p99=1, e2e_latency_ms_p50=1, traces=TRACES,
)  # fmt: skip


def make_launch(index=0, arm="baseline", runs=(RUN,)):
    return Launch(index=index, arm=arm, status="ok", started_at="2026-01-01T00:00:00+00:00", runs=runs)


@pytest.fixture
def bundle(tmp_path):
    return Bundle.create(tmp_path / "run", {"options": {"model": "m"}, "machine": {"cpus": 2}})


def test_what_is_written_is_read_back(bundle):
    arms = (Arm(name="baseline", method="none"), Arm(name="ngram-k5", method="ngram", num_speculative_tokens=5))
    bundle.write_arms(arms, {"ngram-k5": "predicted 1.2"})
    bundle.write_launch(make_launch())
    bundle.event("note", text="hello")
    judgement = Judgement(verdict="disable", policy="jetson", why="A. B.", launches=(make_launch(),))
    bundle.write_judgement(judgement)
    again = Bundle.open(bundle.path)
    assert again.manifest["options"] == {"model": "m"}
    assert again.manifest["schema"] == "surespec/bundle/1"
    assert again.arms() == arms
    assert again.arm_notes() == {"ngram-k5": "predicted 1.2"}
    assert again.launches(with_traces=True) == (make_launch(),)
    assert again.launches()[0].runs[0].traces == ()
    assert again.events()[1]["text"] == "hello"
    assert again.judgement().verdict == "disable"
    assert again.judgement().launches[0].runs[0].traces == (), "traces stay in the launches"
    assert again.problems == []


def test_traces_are_kept_as_they_come(bundle):
    bundle.append_trace(0, "baseline", 1, TRACES[0])
    file = bundle.path / "launches" / "000-baseline" / "traces-c1.jsonl"
    assert json.loads(file.read_text())["prompt_id"] == "p0"
    bundle.append_trace(0, "baseline", 1, TRACES[1])
    bundle.append_trace(0, "baseline", 1, TRACES[2])
    before = file.stat().st_ino
    bundle.write_launch(make_launch())
    assert file.stat().st_ino == before, "appended traces are not written again"
    assert Bundle.open(bundle.path).launches(with_traces=True) == (make_launch(),)


@pytest.mark.parametrize("damage", ["truncate", "garbage", "field", "traces", "tokens", "missing"])
def test_a_damaged_launch_is_named_and_not_counted(bundle, damage):
    bundle.write_launch(make_launch(0))
    bundle.write_launch(make_launch(1, "ngram-k5"))
    folder = bundle.path / "launches" / "001-ngram-k5"
    file, traces = folder / "launch.json", folder / "traces-c1.jsonl"
    text = file.read_text()
    if damage == "truncate":
        file.write_text(text[: len(text) // 2])
    elif damage == "garbage":
        file.write_bytes(b"\xff\x00\xfe")
    elif damage == "field":
        file.write_text(text.replace('"arm"', '"leg"'))
    elif damage == "traces":
        traces.write_text(traces.read_text()[:-20])
    elif damage == "tokens":
        traces.write_text(traces.read_text().replace('"output_tokens": 10', '"output_tokens": 11', 1))
    else:
        file.unlink()
    again = Bundle.open(bundle.path)
    assert [launch.arm for launch in again.launches(with_traces=True)] == ["baseline"]
    assert len(again.problems) == 1
    assert "001-ngram-k5" in again.problems[0]
    assert again.next_index() == 2, "its number is not used again"


def test_a_cut_off_event_is_left_out(bundle):
    bundle.event("a")
    with (bundle.path / "events.jsonl").open("a") as file:
        file.write('{"kind": "b"')
    assert [event["kind"] for event in bundle.events()] == ["created", "a"]


def test_a_newer_schema_is_refused(bundle):
    file = bundle.path / "manifest.json"
    file.write_text(file.read_text().replace("surespec/bundle/1", "surespec/bundle/2"))
    with pytest.raises(BundleError, match="newer surespec") as caught:
        Bundle.open(bundle.path)
    assert "Update" in caught.value.hint


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "other/1"}', '{"schema": "surespec/bundle/x"}', "{"])
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BundleError):
        Bundle.open(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(BundleError, match="no run"):
        Bundle.open(tmp_path / "nothing")


def test_create_never_overwrites(bundle, tmp_path):
    with pytest.raises(BundleError, match="holds a run already") as caught:
        Bundle.create(bundle.path, {})
    assert "--resume" in caught.value.hint
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(BundleError, match="not empty"):
        Bundle.create(tmp_path / "mine", {})


def test_a_place_that_cannot_be_written_is_an_error_with_advice(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="cannot be written") as caught:
        Bundle.create(tmp_path / "file" / "run", {})
    assert "--out" in caught.value.hint


def test_two_processes_do_not_share_a_bundle(bundle):
    code = (
        "import sys, pathlib; from surespec.store import Bundle; from surespec.errors import BundleError\n"
        "try:\n"
        "    with Bundle.open(pathlib.Path(sys.argv[1])).lock(): print('mine')\n"
        "except BundleError as error: print(error)\n"
    )

    def other():
        return subprocess.run([sys.executable, "-c", code, str(bundle.path)], capture_output=True, text=True).stdout

    with bundle.lock():
        assert "Another surespec" in other()
    assert other() == "mine\n"


def test_a_damaged_judgement_is_an_error(bundle):
    assert bundle.judgement() is None
    (bundle.path / "judgement.json").write_text('{"schema": "surespec/tune/1", "verdict": "yes"}')
    with pytest.raises(BundleError, match="damaged"):
        bundle.judgement()


def test_no_half_written_file_stays_when_writing_fails(bundle, monkeypatch):
    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("surespec.store.os.fsync", full)
    with pytest.raises(BundleError, match="No space left"):
        bundle.write_launch(make_launch())
    assert [file.name for file in bundle.path.rglob("*.jsonl")] == ["events.jsonl"]
    assert list(bundle.path.rglob(".*.*")) == []


@pytest.mark.parametrize("place", [".lock", "events.jsonl", "arms.json", "launches/000-baseline/traces-c1.jsonl"])
def test_a_link_in_a_bundle_is_refused_and_nothing_behind_it_is_touched(bundle, tmp_path, place):
    """A run's folder may be a stranger's; going on with it must not write to the file a link leads to."""
    bundle.write_launch(make_launch())
    outside = tmp_path / "mine"
    outside.write_text("mine\n")
    (bundle.path / place).unlink(missing_ok=True)
    (bundle.path / place).symlink_to(outside)
    with pytest.raises(BundleError, match="is a link"):
        Bundle.open(bundle.path)
    assert outside.read_text() == "mine\n"


def test_a_link_to_the_folder_of_a_run_is_followed(bundle, tmp_path):
    (tmp_path / "last").symlink_to(bundle.path)
    assert Bundle.open(tmp_path / "last").manifest == bundle.manifest


def test_a_new_run_is_not_begun_where_a_lock_leads_elsewhere(tmp_path):
    outside = tmp_path / "mine"
    outside.write_text("mine\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(outside)
    with pytest.raises(BundleError, match="is a link"):
        Bundle.create(tmp_path / "run", {})
    assert outside.read_text() == "mine\n"


@pytest.mark.parametrize("text", ["../../mine", "1/../../mine", [1], None])
def test_a_launch_cannot_name_a_file_outside(bundle, text):
    bundle.write_launch(make_launch())
    file = bundle.path / "launches" / "000-baseline" / "launch.json"
    body = json.loads(file.read_text())
    body["runs"][0]["concurrency"] = text
    file.write_text(json.dumps(body))
    assert bundle.launches(with_traces=True) == ()
    assert any("000-baseline cannot be read" in problem for problem in bundle.problems)
