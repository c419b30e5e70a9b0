"""Fault x moment for the real command: nothing measured is lost, nothing is left behind, the verdict is the same.

The full matrix is `make test-faults`; a few cases of it are in the normal tests.
"""

import json
import os
import signal
import subprocess
import sys
import time

import harms
import pytest
from rig import HERE, MOMENTS, Rig, as_undisturbed, copied, make_rig, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="guard, process groups and limits are Linux's")
SERVER_MOMENTS = ("starting", "warming-up", "measuring")
QUICK = {
    ("kill_surespec", "recording"), ("ctrl_c_twice", "measuring"), ("disk_full", "recording"),
}  # fmt: skip


def matrix(faults):
    """All pairs, those outside the quick set marked."""
    return [
        pytest.param(
            fault, moment, id=f"{fault}-{moment}", marks=() if (fault, moment) in QUICK else pytest.mark.faults
        )
        for fault, moments in faults.items()
        for moment in moments
    ]


def check(rig: Rig, fault, moment: str):
    """Harm a run, look at it, resume it (or begin again where it had not begun), and look again."""
    ended = fault(rig, MOMENTS[moment])
    if not (rig.out / "manifest.json").exists():
        assert moment in harms.BEFORE_BUNDLE
        again = rig.run()
        assert as_undisturbed(again), again
    else:
        kept = rig.completed()
        least = 0 if moment in harms.BEFORE_BUNDLE else 3 if MOMENTS[moment].life and moment != "creating" else 0
        assert len(kept) >= least, "the first launch was complete"
        rig.resume(kept)
    rig.no_strange_file()
    return ended


@pytest.mark.parametrize(
    ("fault", "moment"),
    matrix(
        {
            "kill_surespec": MOMENTS,
            "kill_surespec_with_stray": ["measuring"],
            "kill_server": SERVER_MOMENTS,
            "kill_server_with_stray": SERVER_MOMENTS,
            "kill_worker": SERVER_MOMENTS,
            "ctrl_c": MOMENTS,
            "ctrl_c_twice": MOMENTS,
            "hang": SERVER_MOMENTS,
            "read_only": [name for name in MOMENTS if name not in ("loading",)],
        }
    ),
)
def test_a_fault_at_a_moment(fault, moment, tmp_path):
    rig = make_rig(tmp_path / "rig")
    ended = check(rig, getattr(harms, fault), moment)
    if fault.startswith("ctrl_c"):
        assert ended.code == 1 and "nterrupted" in ended.stderr, ended


@pytest.mark.parametrize(("fault", "moment"), matrix({"disk_full": [m for m in MOMENTS if m != "loading"]}))
def test_a_full_disk(fault, moment, tmp_path):
    with harms.small_disk(tmp_path / "small") as rig:
        ended = check(rig, harms.disk_full, moment)
    if moment == "reporting":  # the page is the last file and is there but for its name
        assert ended.code == 0, ended
    else:
        assert ended.code == 1 and ("cannot be written" in ended.stderr), ended


@pytest.mark.faults
@pytest.mark.parametrize("moment", ["warming-up", "between", "recording"])
@pytest.mark.parametrize("jump", harms.JUMPS_S)
def test_a_clock_that_jumps_changes_nothing(jump, moment, tmp_path):
    rig = make_rig(tmp_path / "rig")
    process = rig.start(MOMENTS[moment])
    rig.reached(process)
    (rig.faults / "clock").write_text(str(harms.JUMPS_S[jump]))
    rig.go()
    ended = rig.end(process)
    assert as_undisturbed(ended), ended
    years = {line[11:15] for line in (rig.out / "events.jsonl").read_text().splitlines()}
    assert len(years) == 2, "the clock of the process did jump"
    rig.resume(rig.completed())


@pytest.mark.parametrize(
    ("numbers", "life"),
    [
        pytest.param([3, 3], 1, id="one-of-warm-up", marks=pytest.mark.faults),
        pytest.param([6, 6], 1, id="one-measured", marks=pytest.mark.faults),
        pytest.param([5, 99], 1, id="all-of-a-launch", marks=pytest.mark.faults),
        pytest.param([1, 99], 1, id="from-the-first", marks=pytest.mark.faults),
    ],
)
def test_a_connection_reset_in_the_middle_of_a_stream(numbers, life, tmp_path):
    rig = make_rig(tmp_path / "rig")
    process = rig.start(None, where="request", life=life, action="reset", numbers=numbers)
    ended = rig.end(process)
    kept = rig.completed()
    assert len(kept) >= 3
    if numbers == [6, 6]:
        assert as_undisturbed(ended), ended
        assert "requests failed" in ended.stdout, "a broken request is said"
    rig.resume(kept)


@pytest.mark.faults
def test_a_server_that_hangs_is_given_up_after_the_timeout(tmp_path):
    rig = make_rig(tmp_path / "rig")
    process = rig.start(MOMENTS["measuring"], "--timeout", "1")
    rig.reached(process)
    os.kill(rig.server_pid(), signal.SIGSTOP)
    ended = rig.end(process)
    assert ended.code in (0, 1)
    rig.resume(rig.completed())


def cuts(size: int) -> list[int]:
    """Lengths a file may have after a power cut."""
    return sorted({0, 1, size // 2, size - 1} - {size}) if size else []


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    rig = make_rig(tmp_path_factory.mktemp("finished"))
    ended = rig.run()
    assert as_undisturbed(ended), ended
    return rig


def cut_and_resume(finished: Rig, name: str, length: int, folder):
    rig = copied(finished, folder)
    kept = {
        k: v for k, v in rig.completed().items() if not k.startswith(name.rpartition("/")[0] + "/") or "/" not in name
    }
    os.truncate(rig.out / name, length)
    rig.resume(kept)


BUNDLE = (
    "manifest.json", "events.jsonl", "arms.json", "judgement.json", "report.html", "report.csv", ".lock",
    *(f"launches/{n}/{f}" for n in ("000-baseline", "001-ngram-k5", "002-ngram-k5", "003-baseline")
      for f in ("launch.json", "traces-c1.jsonl", "traces-c2.jsonl", "server.log")),
)  # fmt: skip


def test_the_list_of_bundle_files_is_whole(finished):
    found = {str(path.relative_to(finished.out)) for path in finished.out.rglob("*") if path.is_file()}
    assert found == set(BUNDLE)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "manifest.json" else pytest.mark.faults) for n in BUNDLE],
)
def test_a_file_cut_off_by_a_power_cut(finished, name, tmp_path):
    lengths = cuts((finished.out / name).stat().st_size)
    assert lengths
    for length in lengths if name != "manifest.json" else lengths[2:3]:
        cut_and_resume(finished, name, length, tmp_path / str(length))


@pytest.mark.parametrize("resume", [pytest.param(False, marks=pytest.mark.faults), True])
def test_two_tunes_on_one_bundle(resume, tmp_path):
    rig = make_rig(tmp_path / "rig")
    first = rig.start(MOMENTS["starting"])
    rig.reached(first)
    faults = rig.faults
    second = rig.start(None, resume=resume)
    _, said = second.communicate(timeout=60)
    assert second.returncode == 1
    assert "Traceback" not in said
    assert "Another surespec" in said or "holds a run already" in said
    rig.faults = faults
    rig.go()
    ended = rig.end(first)
    assert as_undisturbed(ended), ended
    assert len(rig.completed()) >= 12


@pytest.mark.faults
def test_another_server_on_the_port_is_never_measured(tmp_path):
    """Between choosing a port and listening on it, somebody else takes it; that one answers like ours."""
    rig = make_rig(tmp_path / "rig")
    process = rig.start(MOMENTS["starting"])
    rig.reached(process)
    thief = tmp_path / "thief"
    thief.mkdir()
    port = json.loads((rig.faults / "life-1").read_text())["port"]
    server = subprocess.Popen([sys.executable, "-I", "-S", str(HERE / "fault_server.py"),
                               str(thief), "--port", str(port)])  # fmt: skip
    try:
        wait_for(lambda: _answers(port), "the other server")
        time.sleep(0.5)  # as long as an engine loads, ours does not listen
        rig.go()
        ended = rig.end(process)
    finally:
        server.kill()
        server.wait()
    assert as_undisturbed(ended), ended
    log = (rig.out / "launches/001-ngram-k5/launch.json").read_text()
    assert '"status": "failed"' in log and "port" in log


def _answers(port: int) -> bool:
    from surespec.engines.process import port_is_free

    return not port_is_free(port)
