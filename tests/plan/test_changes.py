"""Compiled plans are saved, and others held against them."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from trellis.commands.line import main
from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.plan.changes import changes, changes_text
from trellis.plan.saved import Amount, SavedPlan, read_plan, saved_plan
from trellis.recipes import load_run

PLAN = SavedPlan(
    name="tiny",
    target="v5e:2x2",
    versions={"jax": "0.10.2", "libtpu": "0.0.42.1"},
    settings={"mesh.data": 4, "remat.policy": "full"},
    fits=True,
    figures={"step": 1.0, "memory": 4096.0, "sent": 1024.0},
    lines=(
        Amount("step", "computation", "llama.py:104 (__call__)", 0.9),
        Amount("step", "all-gather over data, alone", "llama.py:106 (__call__)", 0.1),
        Amount("memory", "f32[512]", "next_token.py:50 (loss)", 2048.0),
        Amount("memory", "smaller buffers", "", 2048.0),
        Amount("sent", "all-gather over data, bf16[512]", "llama.py:106 (__call__)", 1024.0),
    ),
)


def changed(**figures):
    """The plan with other figures, of which the first line of each has the difference."""
    lines = list(PLAN.lines)
    for figure, value in figures.items():
        index = next(i for i, line in enumerate(lines) if line.figure == figure)
        lines[index] = dataclasses.replace(lines[index], amount=lines[index].amount + value - PLAN.figures[figure])
    return dataclasses.replace(PLAN, figures={**PLAN.figures, **figures}, lines=tuple(lines))


def test_a_file_holds_a_plan(tmp_path):
    PLAN.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == PLAN
    same = changes(PLAN, read_plan(tmp_path / "plan.json"))
    assert not same.lines and not same.settings and not same.worse
    assert "step        1.00 s as before" in changes_text(same) and "no figure is worse (bound 2 %)" in changes_text(
        same
    )


def test_a_load_and_options_that_a_compiler_was_given_are_settings():
    run = load_run("tiny", {"compiler_options.xla_gpu_a": "b"})
    options = {"xla_gpu_c": "d"}
    compiled = SimpleNamespace(peak=1, fits=True, largest=(), memory={}, versions={}, options=options, text="")
    verdict: Any = SimpleNamespace(compiled=compiled, seconds=None, ledger=None, scheduled=1.0, gathers={}, waits=())
    one = SimpleNamespace(target=target("8xH100"), mesh={"data": 8}, times=SimpleNamespace(lines=(), copies=()))
    with_load: Any = lambda load: SimpleNamespace(**vars(one), load=load)
    plans = [saved_plan(run, with_load(load), verdict) for load in (1.0, 1.5)]
    assert changes(*plans).settings == ("load None -> 1.5",)
    assert plans[0].settings["compiler_options.xla_gpu_c"] == "d" and plans[0].settings["mesh.data"] == 8


def test_what_is_worse_is_told_by_line():
    found = changes(PLAN, changed(step=1.5, memory=4100.0, sent=512.0))
    assert found.worse == ["step +50.0 %"]
    assert [(line.figure, line.what, round(line.more, 6)) for line in found.lines] == [
        ("step", "computation", 0.5),
        ("sent", "all-gather over data, bf16[512]", -512.0),
    ], "a thousandth of a figure is left out"
    words = changes_text(found).splitlines()
    assert words[0] == "against tiny on v5e:2x2, jax 0.10.2 libtpu 0.0.42.1"
    assert words[1:4] == [
        "  step        1.00 s -> 1.50 s (+50.0 %)",
        "  memory      4.00 KiB -> 4.00 KiB (+0.1 %)",
        "  sends       1.00 KiB -> 512 B (-50.0 %)",
    ]
    assert words[-1] == "WORSE: step +50.0 % (bound 2 %)"
    assert not changes(PLAN, changed(step=1.5), bound=60).worse
    assert changes(PLAN, changed(step=1.5), bound=60).as_dict()["figures"][0]["after"] == 1.5


def test_a_plan_that_no_longer_fits_is_worse():
    assert changes(PLAN, dataclasses.replace(PLAN, fits=False, figures={"memory": 1.0})).worse == [
        "it fitted before and does not fit now"
    ]


def test_settings_that_differ_are_told():
    other = {"settings": {"mesh.data": 4, "remat.policy": "saved"}, "versions": {"jax": "0.12.0"}}
    found = changes(PLAN, dataclasses.replace(PLAN, **other))
    assert found.settings == ("jax 0.10.2 -> 0.12.0", "libtpu 0.0.42.1 -> None", "remat.policy full -> saved")


def test_lines_of_a_text_that_was_edited_are_found_by_their_functions():
    moved = [dataclasses.replace(line, source=line.source.replace(":10", ":20")) for line in PLAN.lines]
    assert not changes(PLAN, dataclasses.replace(PLAN, lines=tuple(moved))).lines


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, "No such file"),
        ("{", "a file that cannot be read: Expecting"),
        ("[]", "another file"),
        (json.dumps({"format": 0}), "one of another version"),
        (json.dumps({"format": 1}), "a file that cannot be read: 'lines'"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, text, seen):
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match="A plan can be compared only with a saved plan.") as error:
        read_plan(tmp_path / "plan.json")
    assert seen in str(error.value) and "--compile --save FILE" in str(error.value)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (["--save", "plan.json"], "--save without --compile"),
        (["--against", "plan.json", "--compile", "--search"], "--against with --search"),
        (["--against", "plan.json", "--compile", "--bound", "-1"], "-1.0"),
        (["--against", "none.json", "--compile"], "No such file"),
        (["--save", "no_folder/plan.json", "--compile"], "No such file"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, seen, capsys, monkeypatch):
    monkeypatch.setattr("trellis.plan.compile.compile_run", None)  # all before anything is compiled
    assert main(["plan", "tiny", "--on", "v5e:2x2", *options]) == 2
    assert f"seen:  {seen}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    file = str(tmp_path / "plan.json")
    asked = ["plan", "tiny", "--on", "v5e:2x2", "--compile"]
    assert main([*asked, "--save", file]) == 0
    assert f"plan written to {file}" in capsys.readouterr().err
    saved = read_plan(tmp_path / "plan.json")
    for figure in ("memory", "sent"):
        assert sum(x.amount for x in saved.lines if x.figure == figure) == pytest.approx(saved.figures[figure])
    assert sum(x.amount for x in saved.lines if x.figure == "step") == pytest.approx(saved.figures["step"], rel=0.01)
    assert main([*asked, "--against", file, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)["against"]
    assert held["worse"] == held["lines"] == held["settings"] == []

    smaller = {name: value / 2 for name, value in saved.figures.items()}
    dataclasses.replace(saved, figures=smaller).write(tmp_path / "plan.json")
    assert main([*asked, "--against", file]) == 3
    assert "WORSE: step +100.0 %, memory +100.0 %, sends +100.0 % (bound 2 %)" in capsys.readouterr().out
    assert main([*asked, "--against", file, "--bound", "150"]) == 0
