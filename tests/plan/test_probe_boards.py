"""Every board is a captured file system: what was read, what was not, and what is warned about."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surespec.errors import InputFileError, UsageError
from surespec.memory import available_bytes
from surespec.plan_nouns import GIB
from surespec.probe import Machine, detect, device_ids, find_device, probe, simulated_device
from surespec.probe.table import jetpack, parse_l4t

BOARDS = Path(__file__).parents[1] / "data" / "plan" / "boards"


@pytest.mark.parametrize(
    ("board", "sku", "l4t", "jetpack_version", "mode"),
    [
        ("thor-t5000", "thor-t5000", "38.4.0", "7.1", "MAXN"),
        ("thor-t4000", "thor-t4000", "38.4.0", "7.1", "70W"),
        ("orin-agx-64gb", "orin-agx-64gb", "36.4.3", "6.2", "MAXN"),
        ("orin-agx-32gb", "orin-agx-32gb", "39.2.0", "7.2", "MODE_30W"),
        ("orin-nx-16gb", "orin-nx-16gb", "36.4.4", "6.2.1", "25W"),
        ("orin-nx-8gb", "orin-nx-8gb", "36.5", "6.2.2", "MAXN_SUPER"),
        ("orin-nano-8gb", "orin-nano-8gb", "36.4.7", "6.2.1", "MAXN_SUPER"),
        ("orin-nano-4gb", "orin-nano-4gb", "36.3.0", "6.0", "10W"),
        ("thor-container", "thor-t5000", "39.2.0", "7.2", ""),
        ("thor-bare-container", "thor-t5000", "", "", ""),
        ("orin-bare-container", "orin-agx-32gb", "", "", ""),
        ("thor-serving", "thor-t5000", "38.4.0", "7.1", "MAXN"),
    ],
)
def test_jetson_boards(board: str, sku: str, l4t: str, jetpack_version: str, mode: str) -> None:
    device = detect(Machine(BOARDS / board))
    assert (device.sku, device.l4t, device.jetpack, device.power_mode) == (sku, l4t, jetpack_version, mode)
    assert device.unified and device.available_bytes is not None and not device.simulated
    assert device.in_container == ("container" in board)


def test_memory_is_what_the_system_sees_and_not_the_label() -> None:
    assert detect(Machine(BOARDS / "thor-t5000")).memory_bytes == 125772 * 2**20


@pytest.mark.parametrize(
    ("board", "sku", "kind", "gpus", "free_gib"),
    [
        ("rtx-5090", "rtx-5090", "gpu", 1, 31.34),
        ("h100-pair", "h100", "gpu", 2, 40.10),
        ("dgx-spark", "dgx-spark", "unified", 1, 112.30),
        ("unknown-gpu", "gpu", "gpu", 1, 23.98),
    ],
)
def test_gpus(board: str, sku: str, kind: str, gpus: int, free_gib: float) -> None:
    device = detect(Machine(BOARDS / board))
    assert (device.sku, device.kind, device.gpus) == (sku, kind, gpus)
    assert device.available_bytes is not None
    assert device.available_bytes / GIB == pytest.approx(free_gib, abs=0.01)


def test_m7_memory_of_a_running_server_counts_as_free_and_is_said() -> None:
    device = detect(Machine(BOARDS / "h100-pair"))
    assert any(w.startswith("M7: 39.6 GiB") for w in device.warnings)
    assert available_bytes(device) == device.memory_bytes


def test_m7_on_shared_memory_where_the_driver_tells() -> None:
    device = detect(Machine(BOARDS / "thor-serving"))
    assert device.reclaimable_bytes == (80000 + 500) * 2**20 and available_bytes(device) > 100 * GIB
    assert detect(Machine(BOARDS / "orin-agx-64gb")).reclaimable_bytes == 0


def test_an_unknown_gpu_is_judged_by_its_compute_capability() -> None:
    device = detect(Machine(BOARDS / "unknown-gpu"))
    assert (device.compute_capability, device.fp8, device.fp4, device.bandwidth_gb_s) == ("8.6", False, False, None)


def test_a_containers_memory_limit_counts() -> None:
    device = detect(Machine(BOARDS / "cpu-box"))
    assert (device.kind, device.memory_bytes, device.available_bytes) == ("cpu", 8 * GIB, 7 * GIB)
    assert device.in_container
    assert any("bfloat16" in warning for warning in device.warnings)


def test_power_mode_other_than_maxn_is_said() -> None:
    assert any("30W" in note for note in probe(root=BOARDS / "orin-agx-32gb").notes)
    assert not any("G8" in note for note in probe(root=BOARDS / "orin-nano-8gb").notes)


def test_every_device_of_the_table_can_be_simulated() -> None:
    for sku in device_ids():
        device = simulated_device(sku)
        assert device.simulated and device.memory_bytes > 3 * GIB
        assert device.memory_bytes <= device.memory_gb * GIB * 1.03


def test_a_simulated_orin_assumes_the_newest_l4t_and_says_so() -> None:
    device = simulated_device("orin-agx-64gb")
    assert device.l4t == "39.2" and any("39.2" in text for text in device.assumed)
    assert not any("L4T" in text for text in simulated_device("orin-agx-64gb", "36.4.3").assumed)


@pytest.mark.parametrize(
    ("sku", "l4t"), [("thor-t5000", "36.4"), ("orin-agx-64gb", "38.2"), ("h100", "39.2"), ("thor-t5000", "banana")]
)
def test_an_l4t_that_cannot_be(sku: str, l4t: str) -> None:
    with pytest.raises(UsageError):
        simulated_device(sku, l4t)


def test_unknown_device_names_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        simulated_device("thor")
    assert "thor-t5000" in caught.value.hint


@pytest.mark.parametrize(("text", "expected"), [("R36.4.3", "36.4.3"), ("r39.2", "39.2"), ("l4t-36.5", "36.5")])
def test_l4t_spellings(text: str, expected: str) -> None:
    assert parse_l4t(text) == expected


@pytest.mark.parametrize(("l4t", "expected"), [("36.4.7", "6.2.1"), ("38.2.2", "7.0"), ("39.2.0", "7.2"), ("35.1", "")])
def test_l4t_to_jetpack(l4t: str, expected: str) -> None:
    assert jetpack(l4t) == expected


def test_l4t_given_overrides_the_one_read() -> None:
    assert find_device(root=BOARDS / "orin-agx-64gb", l4t="39.2").jetpack == "7.2"


def test_missing_root() -> None:
    with pytest.raises(InputFileError):
        find_device(root=Path("/no/such/folder"))


def test_an_empty_capture_is_a_cpu_without_facts(tmp_path: Path) -> None:
    assert detect(Machine(tmp_path)).kind == "cpu"


def test_this_machine_can_be_read() -> None:
    device = find_device()
    assert device.memory_bytes > 0 and not device.simulated


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(smi=st.text(max_size=200), tegra=st.text(max_size=100), model=st.text(max_size=60), memory=st.text(max_size=80))
def test_no_capture_ends_in_a_traceback(tmp_path: Path, smi: str, tegra: str, model: str, memory: str) -> None:
    """Whatever the files hold, a device comes out."""
    for path, text in {
        "captured/nvidia-smi.csv": smi,
        "etc/nv_tegra_release": "# R36 (release), REVISION: " + tegra,
        "proc/device-tree/model": "jetson orin " + model if len(model) % 2 else model,
        "proc/meminfo": "MemTotal:       8000000 kB\n" + memory,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8", errors="replace")
    device = detect(Machine(tmp_path))
    assert device.memory_bytes >= 0 and device.sku
