"""The page of a run: complete, self-contained, and right also where files or numbers are missing."""

import html.parser
import json
import math
import os
import re

import pytest

from trellis.commands.line import main
from trellis.pages.charts import Chart, Series, draw, nice_ticks, thin
from trellis.pages.run import write_report
from trellis.train.timeline import Timeline, read_events

ABOUT = {
    "machine": {
        "devices": 8, "device_kind": "TPU v5e", "platform": "tpu", "device_memory": 16 << 30, "processes": 2,
        "host": "node-1", "system": "Linux x86_64", "cpu": "", "cores": 4,
        "python": "3.11", "jax": "0.10", "trellis": "0.1",
    },
    "model": {"family": "llama", "parameters": 1_240_000},
    "tokens": {"run": 81920, "corpus": 5_600_000},
    "mesh": {"data": 4, "model": 2},
    "layout": {"preset": "auto", "params": {"vocab": ["model"], "embed": ["data"]}, "compute": {"batch": ["data"]}},
    "arrays": [
        {"name": "embedding", "dtype": "f32", "bytes": 1 << 20, "device_bytes": 1 << 17,
         "dims": [{"name": "vocab", "size": 4096, "mesh": ["model"]}, {"name": "embed", "size": 64, "mesh": ["data"]}]},
        {"name": "mlp.up", "dtype": "f32", "bytes": 1 << 21, "device_bytes": 1 << 18,
         "dims": [{"name": "layers", "size": 4, "mesh": ["data"]}, {"name": "embed", "size": 64, "mesh": []},
                  {"name": "mlp", "size": 128, "mesh": ["model"]}]},
        {"name": "norm", "dtype": "f32", "bytes": 256, "device_bytes": 64,
         "dims": [{"name": "embed", "size": 64, "mesh": ["data"]}]},
    ],
    "memory": {"parameters": 4 << 30, "optimizer": 8 << 30, "temporaries": 1 << 30},
    "ledger": {
        "per_axis": {"data": 3 << 20, "model": 1 << 20}, "per_kind": {"all-gather": 4 << 20},
        "total": 4 << 20, "count": 9,
    },
}  # fmt: skip


def line(step, **more):
    return {"step": step, "tokens": step * 4096, "loss": 8 / step, "learning_rate": 1e-3, "grad_norm": 1.0 / step,
            "tokens_per_second": 1000.0 + step, "mfu": 0.41, "step_seconds": 0.5, "memory_bytes": 3 << 30,
            **more}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "my-run"
    folder.mkdir()
    lines = [
        line(n, **({"validation_loss": 9 / n, "bits_per_byte": 3 / n} if n % 5 == 0 else {})) for n in range(1, 21)
    ]
    write(folder / "metrics.jsonl", lines)
    (folder / "about.json").write_text(json.dumps(ABOUT))
    (folder / "run.yaml").write_text("name: tiny\nmodel:\n  vocab: 512\n")
    (folder / "ledger.txt").write_text("collective  axis\nall-gather  data\n")
    write(folder / "samples.jsonl", [{"step": 20, "name": "sample", "text": "</script><b>x & y"}])
    events = [
        {"time": 0.0, "event": "started", "step": 0},
        {"time": 5.0, "event": "compiled", "step": 0, "seconds": 4.0},
        {"time": 8.0, "event": "checkpoint", "step": 10},
        {"time": 9.0, "event": "interrupted", "step": 10},
        {"time": 50.0, "event": "resumed", "step": 10},
        {"time": 55.0, "event": "paused", "step": 15},
        {"time": 60.0, "event": "resumed", "step": 15},
        {"time": 70.0, "event": "finished", "step": 20},
    ]
    write(folder / "timeline.jsonl", events)
    return folder


def write(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


class Reader(html.parser.HTMLParser):
    """Checks that tags nest, and keeps the text and what would be loaded from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.words, self.loaded, self.kinds = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.kinds.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)


def read(path):
    text = path.read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return text, " ".join(" ".join(reader.words).split()), reader


def test_both_mfus_have_a_digit_behind_the_point(tmp_path):
    write(tmp_path / "metrics.jsonl", [line(1, mfu=0.004, mfu_noncausal=0.0042)])
    _, words, _ = read(write_report(tmp_path))
    assert "MFU (0.4 % non-causal)" in words


def test_the_page_shows_the_run_and_needs_nothing_else(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    text, words, reader = read(path)
    assert reader.loaded == [] and not re.search(r"https?://|@import|url\(", text)
    assert "link" not in reader.kinds and "img" not in reader.kinds
    for expected in (
        "my-run finished",
        "llama, 1.24M parameters · 81.9k tokens · 8 × TPU v5e · mesh data=4 model=2",
        "0.4000 loss",
        "0.4500 validation loss",
        "41.0 % MFU",
        "Throughput",
        "Learning rate",
        "Gradient norm",
        "13.0 GiB on each of 8 devices of 16.0 GiB",
        "optimizer 8.00 GiB",
        "each device sends 4.00 MiB in a step, in 9 collectives",
        "data 3.00 MiB",
        "all-gather data",
        "auto on mesh data=4 model=2",
        "embedding f32[vocab/model=4096 embed/data=64] each device holds 1/8 of 1.00 MiB",
        "mlp.up f32[layers/data=4 embed=64 mlp/model=128] each device holds 1/8 of 2.00 MiB",
        "vocab : 512",
        "</script><b>x & y",
        "steps 0 to 10, interrupted, 9 s",
        "steps 10 to 15, paused, 5 s",
        "24 s in 3 starts",
        "node-1, Linux x86_64",
    ):
        assert expected in words, expected


def test_curves_are_over_tokens_where_sequences_become_longer(folder):
    with open(folder / "timeline.jsonl", "a") as file:
        file.write('{"time": 61, "event": "length", "step": 12, "sequence_length": 4096, "batch_size": 1}\n')
    text, words, _ = read(write_report(folder))
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert data["name"] == "tokens" and data["steps"][-1] == 20 * 4096
    assert "over tokens; 4,096 tokens a sequence from step 13 on" in words
    at = 100 * (12 - 1) / (20 - 1)
    assert text.count(f'x1="{at:.2f}" x2="{at:.2f}"') == len(data["charts"]), "a line in each chart"


def test_the_script_gets_every_value(folder):
    text, _, _ = read(write_report(folder))
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert data["steps"] == list(range(1, 21))
    loss = data["charts"][0]["series"]
    assert [series["name"] for series in loss] == ["training", "validation"]
    assert loss[0]["values"][3] == 2.0 and loss[1]["values"][:5] == [None] * 4 + [1.8]
    plots = re.findall(r'data-chart="(\d+)"', text)
    assert plots == [str(n) for n in range(len(data["charts"]))]


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    _, words, _ = read(write_report(tmp_path))
    assert "training" in words and "Curves" not in words
    write(tmp_path / "metrics.jsonl", [line(1, loss=None, mfu=None)])
    _, words, _ = read(write_report(tmp_path))
    assert "Curves" in words and "Loss" not in words and "Utilisation" not in words


def test_a_run_on_one_device_says_that_nothing_moves(folder):
    about = {**ABOUT, "mesh": {"data": 1}, "layout": {"preset": "single", "params": {}, "compute": {}}}
    about["ledger"] = {"per_axis": {}, "per_kind": {}, "total": 0, "count": 0}
    (folder / "about.json").write_text(json.dumps(about))
    _, words, _ = read(write_report(folder))
    assert "A step moves nothing between devices." in words and "Nothing is sliced." in words
    assert "13.0 GiB on the device" in words


def test_a_layout_is_shown_for_the_axes_that_the_model_has(folder):
    layout = {"preset": "auto", "params": {"vocab": ["model"], "q_latent": ["data"]}, "compute": {"pos": ["data"]}}
    (folder / "about.json").write_text(json.dumps({**ABOUT, "layout": layout}))
    _, words, _ = read(write_report(folder))
    assert "vocab" in words and "pos" in words and "q_latent" not in words


def test_the_command_writes_the_page_and_refuses_what_is_no_run(folder, tmp_path, capsys):
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err == (
        "trellis: The folder of a run must contain its metrics.\n"
        "  seen:  no such folder\n"
        f"  where: {tmp_path / 'absent'}\n"
        "  fix:   name the folder of a run, as in runs/NAME-DATE\n"
    )
    assert main(["report", str(folder / "metrics.jsonl")]) == 2 and "seen:  a file\n" in capsys.readouterr().err


def test_long_runs_are_thinned_to_means():
    assert thin([1.0, None, 3.0, 5.0, None, None], most=3) == [1.0, 4.0, None]
    assert thin([1.0, 2.0], most=2) == [1.0, 2.0]


@pytest.mark.parametrize("low, high", [(0, 1), (0.0021, 0.0043), (-3, 12), (0, 123456), (7, 7)])
def test_ticks_are_round_and_inside(low, high):
    ticks = nice_ticks(low, high)
    assert ticks and all(low - 1e-12 <= tick <= high + 1e-12 for tick in ticks)
    assert low == high or 3 <= len(ticks) <= 7


def test_curves_keep_their_place():
    """The greatest value is drawn above the least, the first step left of the last, and gaps stay gaps."""
    chart = Chart("Loss", (Series("training", [4.0, None, 2.0, 1.0]),))
    path = re.search(r'<path d="([^"]*)" class="curve s0"', draw(chart, [10, 20, 30, 40], 0))[1]
    points = [(kind, float(x), float(y)) for kind, x, y in re.findall(r"([ML])([\d.-]+) ([\d.-]+)", path)]
    assert [kind for kind, _, _ in points] == ["M", "M", "L"]
    assert [round(x, 2) for _, x, _ in points] == [0.0, 66.67, 100.0]
    heights = [y for _, _, y in points]
    assert heights == sorted(heights) and 0 < heights[0] < heights[-1] < 100


def test_tokens_are_counted_in_billions():
    drawn = str(draw(Chart("Loss", (Series("training", [2.0, 1.0]),)), [0, 2_000_000_000], 0))
    assert re.findall(r">([^<>]+)</span>", drawn)[-5:] == ["0", "500M", "1B", "1.5B", "2B"]


def test_a_logarithmic_scale_leaves_out_what_it_cannot_show():
    chart = Chart("Gradient norm", (Series("norm", [100.0, 0.0, 1.0]),), log=True)
    path = re.search(r'<path d="([^"]*)" class="curve s0"', draw(chart, [1, 2, 3], 0))[1]
    assert len(re.findall("[ML]", path)) == 2


def test_files_that_a_machine_that_went_down_left_damaged(folder, capsys):
    """Bytes that are no text, and lines cut off: what can be read is shown, what cannot be left out is told."""
    assert main(["report", str(folder)]) == 0
    whole = (folder / "report.html").read_text()
    for name in ("metrics.jsonl", "samples.jsonl", "timeline.jsonl"):
        with open(folder / name, "ab") as file:
            file.write(b'{"step": 2\xff\0\0')
    timeline = Timeline(folder / "timeline.jsonl")
    timeline.add("resumed", 20)
    assert main(["report", str(folder)]) == 0
    assert read_events(folder / "timeline.jsonl")[-1]["event"] == "resumed"
    assert whole.count("<section") == (folder / "report.html").read_text().count("<section")
    capsys.readouterr()
    (folder / "about.json").write_text('{"machine": {')
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr().err == (
        "trellis: The file about a run must be valid JSON.\n"
        "  seen:  Expecting property name enclosed in double quotes: line 1 column 14 (char 13)\n"
        f"  where: {folder / 'about.json'}\n"
        "  fix:   remove the file: the page leaves it out, and a resumed run writes it again\n"
    )
    assert main(["report", os.fsdecode(b"a\xff")]) == 2
    assert "The path of a run's folder must be valid UTF-8." in capsys.readouterr().err
    (folder / "about.json").write_text("[]")
    assert main(["report", str(folder)]) == 2
    assert "file about a run must be valid JSON.\n  seen:  list instead of an object\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["machine", "model", "tokens", "mesh", "layout", "arrays", "memory", "ledger"])
@pytest.mark.parametrize("value", [3, "x", {"a": "b"}])
def test_what_is_said_about_a_run_in_another_form_is_refused_in_a_message(folder, capsys, name, value):
    path = folder / "about.json"
    about = json.loads(path.read_text())
    assert about[name]
    path.write_text(json.dumps(about | {name: value}))
    assert main(["report", str(folder)]) == 2
    told = capsys.readouterr().err
    assert "The file about a run must hold what `trellis train` wrote." in told
    assert f"where: {folder.name}/about.json\n  fix:   remove the file" in told


def test_events_that_no_run_has_written_are_left_out(folder):
    assert main(["report", str(folder)]) == 0
    known = read_events(folder / "timeline.jsonl")
    for change in (
        {"time": "x"}, {"time": None}, {"time": -1e30}, {"time": math.inf}, {"event": 3}, {"step": "y"},
        {"event": "compiled", "seconds": "x"}, {"event": "length", "sequence_length": 8, "step": None},
    ):  # fmt: skip
        with open(folder / "timeline.jsonl", "a") as file:
            file.write(json.dumps({"time": 1.0, "event": "started", "step": 0} | change) + "\n")
    assert read_events(folder / "timeline.jsonl") == known
    (folder / "timeline.jsonl").write_text('{"time": 1.0, "event": "stopped", "step": null, "why": "no reason"}\n')
    assert main(["report", str(folder)]) == 0
    assert "no reason" in (folder / "report.html").read_text()
