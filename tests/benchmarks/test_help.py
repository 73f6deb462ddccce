"""Every benchmark says what it does when it is asked, and measures nothing for an argument that it does not have."""

import sys

import pytest

from tests.benchmarks.script import FOLDER, load

COMMANDS = [file.stem for file in sorted(FOLDER.glob("*.py")) if "__main__" in file.read_text()]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_parser_has_the_docstring(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert "description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter" in text


@pytest.mark.parametrize(("words", "said"), [(["--help"], "usage"), (["--devices"], "as --FIELD VALUE, got --devices")])
def test_fields_of_a_run(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        load("guard").main(words)
    assert ended.value.code == (0 if words == ["--help"] else 2) and said in "".join(capsys.readouterr())


def test_chips_that_are_not_measured_keep_their_lines(monkeypatch, tmp_path, capsys):
    """A process that measures is stood in for by one that says what it would have found."""
    splash, results = load("splash_schedule"), tmp_path / "splash_schedule.txt"
    monkeypatch.setattr(splash, "RESULTS", results)
    said = lambda number: f"print('v5p | 8,192 | whole | 1024 x 2048 | {number} | 1.02 | 0.98')"
    results.write_text("v5e   8,192      whole   1024 x 2048  0.89      1.04  0.99\nv5p   8,192  whole  512  0.1\n")
    run = splash.subprocess.run
    monkeypatch.setattr(
        splash.subprocess, "run", lambda words, **rest: run([sys.executable, "-c", said("0.91")], **rest)
    )
    monkeypatch.setattr(splash, "version", lambda name: "0.0")
    splash.main(["v5p"])
    rows = [line.split() for line in results.read_text().splitlines() if line.startswith("v")]
    assert rows == [
        ["v5e", "8,192", "whole", "1024", "x", "2048", "0.89", "1.04", "0.99"],
        ["v5p", "8,192", "whole", "1024", "x", "2048", "0.91", "1.02", "0.98"],
    ]
