"""Runs side by side, in the terminal and as a page; a run's page, served while it trains."""

import http.server
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.train.small import trellis
from trellis.errors import UserError
from trellis.pages.compare import MOST_RUNS, curves, differences, page, text
from trellis.pages.read import read_folder
from trellis.pages.serve import serve
from trellis.run.folder import alone


def make(folder: Path, *, rate: float, steps: int, tokens: int, seconds: float, ended: bool = True) -> Path:
    """A run's folder: its loss falls from 4 by `rate` a step."""
    folder.mkdir()
    lines = [
        {"step": i, "tokens": i * tokens, "loss": 4 - rate * i, "step_seconds": seconds}
        | ({"validation_loss": 5.0, "bits_per_byte": 2.0} if i == steps else {})
        for i in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.yaml").write_text(f"name: {folder.name}\noptimizer: {{learning_rate: {rate}}}\nbatch_size: 8\n")
    events = [{"time": 0, "event": "started", "step": 0}, {"time": 9, "event": "finished", "step": steps}]
    (folder / "timeline.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events[: 1 + ended]))
    return folder


@pytest.fixture
def two(tmp_path):
    return [
        make(tmp_path / "slow", rate=0.1, steps=10, tokens=100, seconds=2.0),
        make(tmp_path / "fast", rate=0.2, steps=5, tokens=400, seconds=1.0),
    ]


def test_what_the_terminal_shows(two):
    said = text([read_folder(folder) for folder in two])
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line}
    assert rows["slow"] == ["slow", "10", "1.00k", "20", "s", "50", "3.0000", "5.0000", "2.0000", "█▇▆▆▅▄▃▃▂▁"]
    assert rows["fast"] == ["fast", "5", "2.00k", "5", "s", "400", "3.0000", "5.0000", "2.0000", "█▆▅▃▁"]
    # After 1,000 tokens one is at its end, and the other half way between its second and its third step.
    assert "loss after 1.00k tokens: slow 3.0000, fast 3.5000" in said
    assert "optimizer.learning_rate  0.1   0.2" in said and "batch_size" not in said


def test_a_loss_that_is_no_number_at_the_end_is_not_passed_over(two):
    lines = (two[0] / "metrics.jsonl").read_text().splitlines()
    lines = [re.sub(r'"loss": [\d.]+', '"loss": null', line) if i > 3 else line for i, line in enumerate(lines)]
    (two[0] / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    runs = [read_folder(folder) for folder in two]
    assert "3.6000, then null" in text(runs) and "3.6000, then null" in page(runs)


def test_time_is_that_of_each_step_counted_once(tmp_path):
    """Means of steps are over a second at least, so that a step of 0.9 s is in those of several lines."""
    runs = [make(tmp_path / name, rate=0.1, steps=3, tokens=10, seconds=0.4) for name in ("a", "b")]
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    new = [line | {"seconds": seconds} for line, seconds in zip(lines, (0.0, 0.9, 0.1), strict=True)]
    (runs[0] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in new))
    assert [curve.seconds[-1] for curve in curves([read_folder(run) for run in runs])] == pytest.approx([1.0, 1.2])


def test_losses_over_tokens_of_different_tokenizers_are_not_held_against_each_other(two):
    (two[0] / "run.yaml").write_text("name: slow\nmodel: {vocab: 512}\n")
    (two[1] / "run.yaml").write_text("name: fast\nmodel: {vocab: 4096}\n")
    runs = [read_folder(folder) for folder in two]
    for said in (text(runs), page(runs)):
        assert "loss after" not in said and "bits/byte can be compared, and losses cannot" in said


@pytest.mark.parametrize(
    ("fields", "made", "comparable"),
    [
        (("tokenizer: /a/tokenizer", "tokenizer: /b/tokenizer"), ("1f", "1f"), True),  # an imported run and its copy
        (("tokenizer: /a/tokenizer", "tokenizer: /b/tokenizer"), (None, None), False),
        (("source: {path: a}", "source: {path: b}"), ("1f", "2e"), False),  # of stores each with a tokenizer of its own
        (("source: {path: a}", "source: {path: b}"), ("1f", "1f"), True),
        (("source: {path: a}", "source: {path: b}"), ("1f", None), True),  # an older run does not tell
    ],
)
def test_runs_of_one_tokenizer_are_compared_wherever_it_lies(two, fields, made, comparable):
    for folder, field, tokenizer in zip(two, fields, made, strict=True):
        (folder / "run.yaml").write_text(f"name: a\nmodel: {{vocab: 512}}\ndata: {{{field}}}\n")
        (folder / "about.json").write_text(json.dumps({"tokenizer": tokenizer}))
    runs = [read_folder(folder) for folder in two]
    for said in (text(runs), page(runs)):
        assert ("loss after" in said, "losses cannot" in said) == (comparable, not comparable)


def test_differences_name_what_one_run_lacks(two):
    (two[0] / "run.yaml").write_text("name: slow\noptimizer: {learning_rate: 0.2, beta: true}\nbatch_size: 8\n")
    assert differences([read_folder(folder) for folder in two]) == [("optimizer.beta", ["true", "-"])]


def test_the_page_has_each_curve_over_steps_tokens_and_time(two):
    runs = [read_folder(folder) for folder in two]
    made = page(runs)
    for words in ("Loss over steps", "Loss over tokens", "Loss over seconds of training", "Validation loss over steps"):
        assert words in made
    for value in ("<td>slow</td><td>10</td>", "<td>400</td>", "loss after 1.00k tokens: slow 3.0000, fast 3.5000"):
        assert value in made
    assert "optimizer.learning_rate" in made and made.count('class="curve s1"') >= 3
    assert [curve.seconds[-1] for curve in curves(runs)] == [20.0, 5.0]


def test_a_value_between_two_points_of_the_grid_is_shown(tmp_path):
    """A run of 10 steps beside one of 4,000: all of its curve lies within the first step of the page's grid."""
    short = make(tmp_path / "short", rate=0.1, steps=10, tokens=100, seconds=1.0)
    long = make(tmp_path / "long", rate=0.0001, steps=4000, tokens=100, seconds=1.0)
    written = page([read_folder(short), read_folder(long)])
    drawn = re.findall(r"Validation loss over steps.*?</figure>", written, re.S)
    assert len(drawn) == 1 and all(f'class="dots s{i}"' in drawn[0] for i in (0, 1)), drawn


def test_runs_of_less_than_a_second_have_seconds_below_their_curves(tmp_path):
    runs = [make(tmp_path / name, rate=0.1, steps=9, tokens=10, seconds=0.05) for name in ("a", "b")]
    (figure,) = re.findall(r"<figure>(?:(?!<figure>).)*Loss over seconds.*?</figure>", page(map_read(runs)), re.S)[:1]
    below = re.search(r'<div class="xaxis">(.*?)</div>', figure)[1]
    assert re.findall(r"left:([\d.]+)%\S*>([\d.]+)<", below)[:2] == [("12.50", "0.1"), ("37.50", "0.2")]
    assert re.findall(r'class="curve s0"', figure) and "L100.00 " in figure  # up to the end


def test_every_run_has_a_colour_of_its_own(two):
    made = page(map_read([two[0]] * MOST_RUNS))
    values = dict(re.findall(r"--([sk]\d):(#\w+)", made.partition("data-theme")[0]))
    shown = [re.search(rf"i\.s{i}{{background:var\(--(\w+)\)}}", made)[1] for i in range(MOST_RUNS)]
    assert len({values[name] for name in shown}) == MOST_RUNS


def map_read(folders: list[Path]) -> list:
    return [read_folder(folder) for folder in folders]


def test_a_file_that_is_no_yaml_is_refused(two):
    for text_of, seen in (("steps: [", "while parsing a flow node"), ("many", "many")):
        (two[1] / "run.yaml").write_text(text_of)
        with pytest.raises(UserError, match=f"A run's file must be valid YAML, of fields.\n  seen:  {seen}") as error:
            differences([read_folder(folder) for folder in two])
        assert error.value.where == "fast/run.yaml"


def test_too_few_and_too_many_are_refused(two):
    run = read_folder(two[0])
    for count in (1, MOST_RUNS + 1):
        with pytest.raises(UserError, match=f"Only 2 to {MOST_RUNS} runs can be compared"):
            text([run] * count)
    assert [curve.name for curve in curves([run, run])] == ["slow (1)", "slow (2)"]


def test_the_command(two, tmp_path, capsys):
    code, out, err = trellis(capsys, "compare", *two, "--page", tmp_path / "both.html")
    assert (code, err) == (0, "") and out.endswith(f"page     {tmp_path / 'both.html'}\n")
    assert (tmp_path / "both.html").read_text().startswith("<!doctype html>")
    code, _, err = trellis(capsys, "compare", two[0], tmp_path / "absent")
    assert code == 2 and "no such folder" in err


@pytest.mark.parametrize("page", [".", "none/page.html"])
def test_a_page_that_cannot_be_written_is_told_first(two, page, tmp_path, capsys, monkeypatch):
    """A folder ended in a ValueError of Python's, after the table."""
    monkeypatch.chdir(tmp_path)
    code, out, err = trellis(capsys, "compare", *two, "--page", page)
    assert (code, out) == (2, "") and f"where: {page}\n" in err


def test_a_run_without_a_step_is_left_out(two, tmp_path, capsys):
    waiting = make(tmp_path / "waiting", rate=0.3, steps=0, tokens=100, seconds=1.0)
    code, out, _ = trellis(capsys, "compare", two[0], waiting, two[1], "--page", tmp_path / "both.html")
    assert code == 0 and out.startswith("waiting is left out: it has no step yet\n\nrun ")
    assert "waiting" not in out[10:] and "waiting" not in (tmp_path / "both.html").read_text()
    (waiting / "metrics.jsonl").unlink()  # as in an imported run, or after `--until 0`
    code, again, _ = trellis(capsys, "compare", two[0], waiting, two[1], "--page", tmp_path / "both.html")
    assert code == 0 and again == out
    code, _, err = trellis(capsys, "compare", two[0], waiting)
    assert code == 2 and "A run must have a step to be compared" in err


def get(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()


def test_a_run_is_served_while_it_trains(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").touch()
    with serve(folder, host="127.0.0.1", port=0, every=7) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        assert "<pre>no step yet</pre>" in get(url) and 'content="7"' in get(url)
        with alone(folder):
            assert "<pre>no step yet</pre>" in get(url)
        assert "<pre>no step yet, and no process trains here</pre>" in get(url)
        (folder / ".lock").unlink()
        folder.rmdir()
        assert f"{folder} is no longer a folder" in get(url) and 'content="7"' in get(url)
        make(folder, rate=0.1, steps=10, tokens=100, seconds=2.0, ended=False)
        assert "training" in get(url) and 'http-equiv="refresh" content="7"' in get(url)
        with alone(folder):
            assert "training" in get(url) and "refresh" in get(url)
        assert '"chip killed"' in get(url) and "refresh" not in get(url)
        (folder / "about.json").write_text("{")
        assert "The file about a run must be valid JSON." in get(url) and str(folder / "about.json") in get(url)
        (folder / "about.json").unlink()
        (folder / "samples.jsonl").mkdir()  # as of any file that the system does not let one read
        assert "Is a directory" in get(url) and str(folder / "samples.jsonl") in get(url) and 'content="7"' in get(url)
        (folder / "samples.jsonl").rmdir()
        (folder / "timeline.jsonl").write_text('{"time": 9, "event": "finished", "step": 10}\n')
        assert "refresh" not in get(url), "a page that stays as it is is not read again"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(url + "run.yaml")
        server.shutdown()


def test_a_browser_that_leaves_is_no_error(tmp_path, capsys, monkeypatch):
    def fails(*_):
        raise error

    (tmp_path / "run.yaml").touch()
    monkeypatch.setattr("trellis.pages.serve._current", fails)
    for error, told in ((ConnectionResetError, False), (BrokenPipeError, False), (ZeroDivisionError, True)):
        with serve(tmp_path, host="127.0.0.1", port=0, every=7) as server:
            mine, browser = socket.socketpair()
            browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
            server.process_request_thread(mine, ("127.0.0.1", 1))
            browser.close()
        assert (error.__name__ in capsys.readouterr().err) == told


def test_a_watcher_says_at_once_what_it_waits_for(tmp_path, capsys, monkeypatch):
    def interrupted(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(http.server.ThreadingHTTPServer, "serve_forever", interrupted)
    (tmp_path / "run.yaml").touch()
    code, out, _ = trellis(capsys, "watch", tmp_path, "--port", 0)
    assert code == 0 and "no step yet: the page waits for metrics.jsonl" in out
    (tmp_path / "metrics.jsonl").touch()
    assert "no step yet" not in trellis(capsys, "watch", tmp_path, "--port", 0)[1]
    if socket.has_ipv6:
        assert "http://[::1]:" in trellis(capsys, "watch", tmp_path, "--host", "::1", "--port", 0)[1]


def test_what_cannot_be_served_is_refused(tmp_path, capsys):
    code, _, err = trellis(capsys, "watch", tmp_path / "absent")
    assert code == 2 and "A run to watch must have a folder." in err
    code, _, err = trellis(capsys, "watch", "s3://bucket/run")
    assert code == 2 and "A run's folder must be in a file system." in err and "s3://bucket/run" in err
    code, _, err = trellis(capsys, "watch", tmp_path)
    assert code == 2 and "A folder to watch must be a run's." in err and "metrics.jsonl, .lock, but nothing" in err
    (tmp_path / "run.yaml").touch()
    code, _, err = trellis(capsys, "watch", tmp_path / "run.yaml")
    assert code == 2 and "seen:  a file" in err
    code, _, err = trellis(capsys, "watch", tmp_path, "--port", 70000)
    assert code == 2 and "`--port` must be from 0 to 65535." in err
    code, _, err = trellis(capsys, "watch", tmp_path, "--host", "256.0.0.1", "--port", 0)
    assert code == 2 and "The address must be free and belong to this machine." in err and "where: 256.0.0.1:0" in err
