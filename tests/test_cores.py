"""What is measured on a part of a machine is not taken for the whole of it, nor the other way round."""

import jax
import pytest

from trellis import cores
from trellis.hardware.remembered import devices_here


@pytest.mark.parametrize(
    ("quota", "found"), [("150000 100000\n", 2), ("max 100000\n", 4), ("800000 100000\n", 4), ("", 4)]
)
def test_a_container_with_less_time_has_fewer_cores(monkeypatch, tmp_path, quota, found):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "cpu.max")
    assert cores.usable_cores() == found


def test_a_part_of_a_machine_keeps_its_own_measurements(monkeypatch):
    """A process on one core of four that met the peak of all four would report a quarter of its utilisation."""
    kept = set()
    for allowed in ({0}, {0, 1, 2, 3}):
        monkeypatch.setattr("os.sched_getaffinity", lambda process, allowed=allowed: allowed, raising=False)
        monkeypatch.setattr(cores, "_QUOTA", cores.Path("/nowhere"))
        kept.add(devices_here(jax.devices()[:1]))
    assert len(kept) == 2


def test_a_machine_is_crowded_by_more_programs_than_it_has_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for load, crowded in ((2.9, False), (3.1, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        assert cores.is_crowded() == crowded
