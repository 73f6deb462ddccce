"""What this machine's processor is called."""

import platform

import pytest

from trellis.hardware.platform import processor

MILAN = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: avx2\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (MILAN, "AMD EPYC (family 25, model 1)"),
        (f"{MILAN}\n{MILAN.replace(': 1', ': 17')}", "AMD EPYC (family 25, model 1)"),
        (MILAN.replace("model\t\t: 1\n", "model\t\t: 17\n"), "AMD EPYC (family 25, model 17)"),
        ("model name\t: POWER9\n\nplatform\t: PowerNV\n", "POWER9"),
    ],
)
def test_processors_of_one_name_are_told_apart(text, name, tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert processor(file) == name


def test_where_the_system_has_no_names_the_machine_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert processor(tmp_path / "cpuinfo") == "arm"
    assert processor(tmp_path / "absent") == "arm"
