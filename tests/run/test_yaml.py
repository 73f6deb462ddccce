"""YAML is read the same by libyaml and without it."""

import pytest
import yaml

from trellis.files import load_yaml, yaml_problem

GOOD = (
    "a: [1, 2.5, null]\nb: {c: .inf}",
    "[]",
    "",
    "9" * 500,
    "a: 2000-01-01",
    '["\\0"]',
    "٣: 1",
    "a: &x {b: 1}\nc: {<<: *x, b: 2}",
)
WRONG = ("[", "steps: 1\n  x: 2", "\0", "[!!python/name:os.system ]", "a:\n\t- b", "? [a]\n: b")


@pytest.mark.parametrize("text", GOOD)
def test_values(text, monkeypatch):
    found = load_yaml(text)
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert found == load_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize("text", WRONG)
def test_errors_are_those_that_show_the_line(text):
    with pytest.raises(yaml.YAMLError) as ours:
        load_yaml(text)
    with pytest.raises(yaml.YAMLError) as written:
        yaml.safe_load(text)
    assert str(ours.value) == str(written.value)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("levels", [500, 60_000])
def test_lists_within_lists_are_refused(levels):
    """By whichever parser: libyaml's would take the first, and end the process with the second."""
    with pytest.raises(yaml.YAMLError, match="lists or mappings are nested too deeply"):
        load_yaml("[" * levels + "]" * levels)


def test_what_stands_twice_is_refused_with_its_line():
    with pytest.raises(yaml.YAMLError, match="`steps` is written twice") as error:
        load_yaml("mesh: {data: 2}\nsteps: 3\nsteps: 5\n")
    assert "line 3, column 1" in str(error.value)
    assert yaml_problem(error.value) == "`steps` is written twice in line 3, column 1: steps: 5 ^"


@pytest.mark.parametrize("text, value", [("010", 8), ("-0_17", -15), ("1:30", 90), ("1:30.5", 90.5)])
def test_numbers_that_read_as_others_are_refused_with_their_line(text, value, monkeypatch):
    for _ in range(2):
        with pytest.raises(
            yaml.YAMLError, match=f"`{text}` is {value} in YAML: write that, or put it in quotes"
        ) as error:
            load_yaml(f"steps: 3\nseed: {text}")
        assert "line 2, column 7" in str(error.value)
        assert load_yaml(f"[0, -0, 07, 0x10, 0b11, 0.5, 010.5, '{text}']") == [0, 0, 7, 16, 3, 0.5, 10.5, text]
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
