"""Every field of a run gets wrong, absurd and extreme values through the command line.

Each is taken, and then the run has it, or it is refused in four parts. There is no third way.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import pytest

from tests.train.small import trellis
from trellis.commands import train as train_command
from trellis.run.config import Run
from trellis.run.overrides import read
from trellis.run.run_file import read_run
from trellis.run.schema import build, fields_of, members, plain, tag_of
from trellis.train import loop

pytestmark = pytest.mark.usefixtures("own_cache")

VALUES = (
    *("", "nosuch", "null", "true", "false", "[]", "{}", "-1", "0", "1", "3", "0.5", "1.5", " 3", "٣"),
    *("nan", "inf", "-1e400", "1e400", "1e-400", "1e30", "1e-30", "1e300", "1e-300"),
    *("2147483647", "2147483648", "9" * 30, "9" * 5000, "x" * 5000, "a/b", "/dev/null", "~"),
    *("[1, 2]", "[null]", "[.nan]", "[2000-01-01]", "[a, ]", "[", "{", "[&a [*a]]", "[!!python/name:os.system ]"),
    *("{a: 1}", "{1: 2}", "{a: {b: c}}", "{kind: x}", "{[1]: 2}", "[{step: 0}]", '["\\0"]', "data", "data/model"),
)
# What a step is traced with, of those values that were taken.
EXTREMES = ("", "0", "1", "3", "1e30", "1e-30", "2147483647")

_LLAMA = "vocab: 257, embed: 32, layers: 2, heads: 4, mlp: 64"
_GROUPED = f"{_LLAMA}, kv_heads: 2, head_dim: 16, rope_theta: 10000.0"
# Options that choose a variant and give it what has no default.
CHOOSE = {
    "gpt2": {"model": f"{{family: gpt2, {_LLAMA}, positions: 64, dropout: 0.0}}"},
    "gptj": {"model": f"{{family: gptj, {_LLAMA}, rotary_dim: 4}}"},
    "qwen3": {"model": f"{{family: qwen3, {_GROUPED}, tie_embeddings: true}}"},
    **{
        family: {"model": f"{{family: {family}, {_GROUPED}, experts: 4, experts_per_token: 2, tie_embeddings: false}}"}
        for family in ("mixtral", "qwen3_moe")
    },
    "gpt_oss": {
        "model": f"{{family: gpt_oss, {_GROUPED}, window: 8, experts: 4, experts_per_token: 2, tie_embeddings: false}}"
    },
    "deepseek_v3": {
        "model": f"{{family: deepseek_v3, {_LLAMA}, rope_theta: 10000.0, dense_layers: 1, q_latent: 16, kv_latent: 16, "
        "nope_dim: 8, rope_dim: 4, value_dim: 8, dense_mlp: 64, shared_mlp: 16, experts: 4, experts_per_token: 2, "
        "tie_embeddings: false}"
    },
    "linear_scaling": {"model.rope_scaling": "{kind: linear, factor: 2.0}"},
    "yarn_scaling": {"model.rope_scaling": "{kind: yarn, factor: 2.0, original_context: 16}"},
    "embedded": {"data.source": "{kind: embedded, vocab: 257}"},
    "mixture": {"data.source": "{kind: mixture, parts: [{name: a, path: STORES/train, weight: 1}]}"},
    "wsd": {"schedule": "wsd", "schedule.decay_steps": "2"},
}


class Case(NamedTuple):
    """A field of a run, its type, and the options that make the run have it."""

    name: str
    type: Any
    chosen: dict[str, str]


def cases(cls: Any = Run, path: str = "", chosen: dict[str, str] | None = None) -> Iterator[Case]:
    """Every field, and those of every variant of a field."""
    for name, field in fields_of(cls).items():
        dotted = f"{path}.{name}" if path else name
        yield Case(dotted, field.type, chosen or {})
        for member in members(field.type):
            if dataclasses.is_dataclass(member) and isinstance(member, type):
                tag = tag_of(member)
                choose = {dotted: tag[1]} if tag else {}
                if tag and tag[1] in CHOOSE:
                    choose = CHOOSE[tag[1]]
                elif tag and tag[1] in ("llama", "store"):
                    choose = {}
                elif dotted == "profile":
                    choose = {"profile.start": "1"}
                elif dotted == "model.rope_scaling":
                    required = {n: f for n, f in fields_of(member).items() if f.default is dataclasses.MISSING}
                    sizes = ", ".join(f"{n}: {2 + i}.0" for i, n in enumerate(required))
                    choose = {dotted: f"{{{f'{tag[0]}: {tag[1]}, ' if tag else ''}{sizes}}}"}
                yield from cases(member, dotted, {**(chosen or {}), **choose})


SECTIONS = {}
for _case in cases():
    SECTIONS.setdefault(_case.name.partition(".")[0], []).append(_case)


@pytest.fixture
def attempt(run_file, tmp_path, capsys):
    """Gives a field a value, and tells what is wrong with how the command line answers; or nothing."""
    jax.devices()
    numbers = iter(range(10**9))

    def give(case: Case, text: str, taken: list[Run]) -> str | None:
        folder = tmp_path / str(next(numbers))
        options = {**case.chosen, case.name: text}
        stores = str(run_file.parent)
        words = [f"--{name}={value.replace('STORES', stores)}" for name, value in options.items()]
        before = len(taken)
        try:
            code, _, err = trellis(capsys, "train", run_file, "--run-dir", folder, *words)
        except Exception as error:
            return f"{type(error).__name__}: {error!s:.200}"
        if code == 2:
            parts = ("trellis: ", "\n  seen:  ", "\n  where: ", "\n  fix:   ")
            return None if all(part in err for part in parts) and len(err) < 2500 else f"not in four parts: {err:.300}"
        if code != 0:
            return f"exit code {code}: {err:.200}"
        if len(taken) == before:
            return "exit code 0, and nothing was trained"
        given = read(case.type, text)
        has = functools.reduce(operator.getitem, case.name.split("."), plain(taken[-1]))
        if isinstance(given, dict):  # it replaces parts and leaves the others
            ignored = [name for name in given if has.get(name) != given[name]]
        else:
            ignored = has != plain(build(case.type, given))
        if ignored or read_run(folder / "run.yaml") != taken[-1]:
            return f"the run has {has!r:.80}"
        return None

    return give


@pytest.mark.parametrize(
    "section", [pytest.param(s, marks=pytest.mark.slow if len(SECTIONS[s]) > 2 else ()) for s in SECTIONS]
)
def test_every_field_takes_a_value_or_refuses_it(section, attempt, monkeypatch):
    taken: list[Run] = []
    monkeypatch.setattr(train_command, "train_run", lambda run, *_, **__: taken.append(run) or 0)
    monkeypatch.setattr("trellis.train.choices._LONG", float("inf"))  # nothing is measured for runs that do not train
    found = {(c.name, v[:40], *c.chosen.values()): attempt(c, v, taken) for c in SECTIONS[section] for v in VALUES}
    assert not {given: wrong for given, wrong in found.items() if wrong}


# What no trace depends on.
UNTRACED = ("name", "distributed", "logging", "guard", "deadline", "profile")


@pytest.mark.slow
@pytest.mark.parametrize("section", [s for s in SECTIONS if s not in UNTRACED])
def test_what_a_field_takes_can_be_assembled_and_traced(section, attempt, monkeypatch):
    taken: list[Run] = []

    def train(assembled, *_, **__):
        taken.append(assembled.run)
        return loop.Outcome(state=None, step=0, exit_code=0, lines=[], programs=[], token_seconds=None)

    monkeypatch.setattr(loop, "train", train)
    tried = {}  # each field once: families share most of theirs
    for case in SECTIONS[section]:
        if case.name != "data.tokenizer" and "embedded" not in str(case.chosen):
            tried.setdefault(case.name, case)
    one_layer = {} if section == "model" else {"model.layers": "1"}
    chosen = [case._replace(chosen={**one_layer, **case.chosen}) for case in tried.values()]
    found = {(c.name, v, *c.chosen.values()): attempt(c, v, taken) for c in chosen for v in EXTREMES}
    assert not {given: wrong for given, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    "text",
    ["", "- 1", "steps: .inf", "steps: [1]", "? [a]\n: b", "a: &a [*a]", "steps: 1\n  x: 2", "\0", "3: 4",
     "base: [tiny]", "base: tiny\nmesh: 3", "base: tiny\nmodel: {vocab: {a: b}}",
     "base: tiny\nlayout: [[]]", "mesh: &a {model: *a}"],
)  # fmt: skip
def test_a_file_is_refused_in_four_parts(text, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    code, _, err = trellis(capsys, "train", path, "--run-dir", tmp_path / "run")
    assert code == 2
    assert all(part in err for part in ("trellis: ", "\n  seen:  ", "\n  where: ", "\n  fix:   ")), err
