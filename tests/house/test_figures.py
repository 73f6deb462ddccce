"""Figures in the README and the manual are those of the committed results."""

import importlib.util
import json
import re
import statistics
from pathlib import Path

import pytest

from trellis.recipes import RECIPES, hardware_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README, PLAN = (ROOT / "README.md").read_text(), (ROOT / "docs" / "plan.md").read_text()


def measured(name: str):
    return json.loads((RESULTS / name).read_text())


def times(name: str, shape: str, dtype: str, *others: str) -> list[str]:
    """How many times as fast as plain JAX, and as others, Trellis was in a file of results."""
    rows = {r["who"]: r for r in measured(name)["rows"] if (r["shape"], r["dtype"]) == (shape, dtype)}
    speed = {who: row["tokens_per_second"] for who, row in rows.items()}
    against = f"{rows['trellis']['against_plain']:g}"
    return [against, *(f"{speed['trellis'] / speed[who]:.2f}" for who in others)]


def of_both(name: str, dtype: str) -> str:
    nano, llama = times(name, "nano", dtype, "nanogpt"), times(name, "small-llama", dtype, "transformers", "levanter")
    return f"{' and '.join(nano)}; {llama[0]}, {llama[1]} and {llama[2]} times"


def test_speed_beside_others():
    nano = times("train_speed.json", "nano", "float32", "nanogpt")
    llama = times("train_speed.json", "small-llama", "float32", "transformers", "levanter")
    assert f"| {nano[0]} and {nano[1]} times |" in README
    assert f"| {llama[0]}, {llama[1]} and {llama[2]} times |" in README
    assert f"| {of_both('train_speed.json', 'bfloat16')} |" in README
    assert f"| {of_both('train_speed_family25.json', 'float32')} |" in README
    for name in ("train_speed_family25_model17.json", "train_speed_intel.json"):
        for dtype in ("float32", "bfloat16"):
            assert f"| {of_both(name, dtype)} |" in README


def test_tracing_and_tokenizing():
    assert f"| {measured('trace_overhead.json')['ratio']:.2f} times | `trace_overhead.py` |" in README
    kinds = [
        kind for kind in measured("tokenize.json").values() if isinstance(kind, dict) and "tokens_per_second" in kind
    ]
    spans = []
    for other in ("encode_batch", "datasets.map"):
        ratios = sorted(kind[f"trellis over {other}"]["by the clock"] for kind in kinds)
        spans.append(f"{ratios[0]:.2f} to {ratios[-1]:.2f}")
    assert f"| {' and '.join(spans)} times |" in README


def test_the_starter_run():
    found = measured("starter.json")
    assert f"{found['seconds']} s, about half" in README
    assert f"about {found['found']['validation_loss']:.2f}, {found['found']['bits_per_byte']:.2f} bits a byte" in README


def test_predictions():
    medians = {}
    for name in ("plan_vs_published", "plan_vs_measured"):
        medians[name] = re.search(r"^median error (\d+)%", (RESULTS / f"{name}.txt").read_text(), re.M)[1]
        (line,) = [line for line in README.splitlines() if f"`{name}.py`" in line]
        assert f"median error {medians[name]} %" in line
    assert f"The median error of 16 rows is {medians['plan_vs_published']} %" in PLAN
    assert f"The median error of twelve shapes is {medians['plan_vs_measured']} %" in PLAN
    published = (RESULTS / "plan_vs_published.txt").read_text()
    assert "\nin none of these: the two rows of longer sequences" in published
    counted = re.findall(r"^(?!.* at \d+,\d{3} ).*?([+-]\d+)%  +\d+ GiB", published, re.M)
    assert len(counted) == 16
    worst = max(map(int, counted))
    assert f"optimistic by up to {worst} %" in README


def test_memory_beside_compilers():
    table = re.search(r"^\| run \| predicted GiB .*?\n\n", PLAN, re.M | re.S)[0]
    errors = sorted(abs(float(error)) for error in re.findall(r"\| ([+-][\d.]+) % \|$", table, re.M))
    within = [error for error in errors if error <= 10]
    assert len(errors) == len(within) + 2
    said = f"{len(errors)} runs | median error {errors[len(errors) // 2]:g} %, {len(within)} within 10 %, two at"
    assert f"{said} {errors[-1]:.0f} %" in README


def test_memory_of_recipes_beside_compilers():
    rows = (RESULTS / "recipes_compiled.txt").read_text().splitlines()[1:]
    errors = sorted(abs(float(re.search(r"  ([+-][\d.]+)%  ", row)[1])) for row in rows)
    few = sum(error <= 10 for error in errors)
    said = f"median error {statistics.median(errors):.1f} %, {few} within 10 %"
    assert f"for all {len(rows)} recipes as they are | {said}, the worst {errors[-1]:.0f} %" in README
    median = f"the median of these {len(rows)} is off by {statistics.median(errors):.1f} %, {few} within 10 %"
    signed = [float(re.search(r"  ([+-][\d.]+)%  ", row)[1]) for row in rows]
    short = sum(error < -10 for error in signed)
    assert median in PLAN and f"in {('no', 'one', 'two', 'three')[short]} recipes of {len(rows)}" in PLAN
    free = min(1 - float(compiled) / float(most) for _, compiled, most in (row.split()[3:6] for row in rows))
    assert f"all fit, with {int(100 * free)} % of a device's memory or more to spare" in PLAN
    assert {row.split()[0] for row in rows} == {name for name in RECIPES if hardware_of(name)}


def test_steps_scheduled_by_costs():
    rows = (line.split() for line in (RESULTS / "schedules.txt").read_text().splitlines()[1:])
    seconds = {row[0]: (f"{float(row[7]):.2f}", f"{float(row[3]):.2f}") for row in rows}
    for name, other in (("mixtral_8x7b", "mixtral_8x7b_b200_32"), ("deepseek_v3", "deepseek_v3_b200_256")):
        (costs, alone), (costs_b200, alone_b200) = seconds[name], seconds[other]
        said = f"takes {costs} s instead of {alone} on H100s and {costs_b200} instead of {alone_b200} on B200s"
        assert said in PLAN, said


def test_every_picture_has_a_script():
    scripts = "".join(file.read_text() for folder in ("docs", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
    pictures = sorted((ROOT / "docs").rglob("*.png"))
    assert pictures and not [picture for picture in pictures if f'"{picture.name}"' not in scripts]


def test_the_picture_of_a_report_is_what_a_browser_shows(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("report_picture", ROOT / "docs" / "report_picture.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="A picture of a page needs a browser"):
        script.picture(tmp_path / "report.html", tmp_path / "report.png")
    browser = tmp_path / "chromium"
    browser.write_text('#!/bin/sh\nfor a in "$@"; do case $a in --screenshot=*) echo "$@" > "${a#*=}";; esac; done\n')
    browser.chmod(0o755)
    script.picture(tmp_path / "report.html", tmp_path / "report.png")
    asked = (tmp_path / "report.png").read_text()
    assert "--window-size=1280,1400" in asked and (tmp_path / "report.html").as_uri() in asked
