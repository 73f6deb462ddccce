"""A run folder and a checkpoint of an earlier version are read, evaluated, reported and resumed by this one.

`run-of-0.1.tar.gz` holds the run's folder after 4 of its 6 steps, its token stores, and in `rest.jsonl` the lines of
metrics that the same version then wrote for the last two steps.
"""

import json
import tarfile
from pathlib import Path

import pytest

from tests.train.small import trellis
from trellis.train.trackers import read_lines

ARCHIVE = Path(__file__).parents[1] / "checkpoints" / "earlier" / "run-of-0.1.tar.gz"


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_run_of_an_earlier_version_goes_on(tmp_path, monkeypatch, capsys):
    with tarfile.open(ARCHIVE) as archive:
        # Python 3.11 has filters from 3.11.4 on; 3.14 takes this one by itself.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    monkeypatch.chdir(tmp_path)
    before = read_lines(Path("run/metrics.jsonl"))
    assert [line["step"] for line in before] == [1, 2, 3, 4]

    code, out, err = trellis(capsys, "evaluate", "run", "--json")
    assert code == 0, err
    assert json.loads(out)["step"] == 4
    assert json.loads(out)["validation_loss"] == pytest.approx(5.401384353637695, rel=1e-6)

    assert trellis(capsys, "report", "run")[0] == 0 and "validation loss" in Path("run/report.html").read_text()

    code, _, err = trellis(capsys, "train", "run")
    assert code == 0, err
    assert "resuming after step 4" in err
    lines = read_lines(Path("run/metrics.jsonl"))
    assert lines[:4] == before
    for line, wanted in zip(lines[4:], read_lines(Path("rest.jsonl")), strict=True):
        assert (line["step"], line["tokens"]) == (wanted["step"], wanted["tokens"])
        for name in {"loss", "grad_norm", "learning_rate", "validation_loss"} & set(wanted):
            assert line[name] == pytest.approx(wanted[name], rel=1e-5), name
