"""Every field of a run gets wrong, absurd and extreme values through the command line.

Each is taken, and then the run has it, or it is refused in four parts. There is no third way.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from tests.train.small import trellis
from trellis.commands import train as train_command
from trellis.run.config import Distributed, Run
from trellis.run.overrides import read
from trellis.run.run_file import read_run
from trellis.run.schema import build, fields_of, members, plain, tag_of
from trellis.train import choices, loop, summary

pytestmark = pytest.mark.usefixtures("own_cache")

VALUES = (
    *("", "nosuch", "null", "true", "false", "[]", "{}", "-1", "0", "1", "3", "0.5", "1.5", " 3", "٣"),
    *("nan", "inf", "-1e400", "1e400", "1e-400", "1e30", "1e-30", "1e300", "1e-300"),
    *("2147483647", "2147483648", "9" * 30, "9" * 5000, "x" * 5000, "a/b", "/dev/null", "~"),
    *("[1, 2]", "[null]", "[.nan]", "[2000-01-01]", "[a, ]", "[", "{", "[&a [*a]]", "[!!python/name:os.system ]"),
    *("{a: 1}", "{1: 2}", "{a: {b: c}}", "{kind: x}", "{[1]: 2}", "[{step: 0}]", '["\\0"]', "data", "data/model"),
)
# What a step is traced with, of those values that were taken.
EXTREMES = ("true", "", "0", "1", "3", "1e30", "1e-30", "2147483647")

_LLAMA = "vocab: 257, embed: 32, layers: 2, heads: 4, mlp: 64"
_GROUPED = f"{_LLAMA}, kv_heads: 2, head_dim: 16, rope_theta: 10000.0"
# Options that choose a variant and give it what has no default.
CHOOSE = {
    "gpt2": {
        "model": f"{{family: gpt2, {_LLAMA}, positions: 64, dropout: 0.0, scale_by_inverse_layer: false, "
        "upcast_attention: false}"
    },
    "gptj": {"model": f"{{family: gptj, {_LLAMA}, rotary_dim: 4}}"},
    **{
        family: {"model": f"{{family: {family}, {_GROUPED}, tie_embeddings: true}}"}
        for family in ("mistral", "qwen2", "qwen3", "olmo2")
    },
    **{
        family: {"model": f"{{family: {family}, {_GROUPED}, experts: 4, experts_per_token: 2, tie_embeddings: false}}"}
        for family in ("mixtral", "qwen3_moe")
    },
    "gemma3": {"model": f"{{family: gemma3, {_GROUPED}, window: 8, global_every: 2, query_scale: 16}}"},
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


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
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
                    numbers = {n: 16 if n == "original_context" else 2.0 + i for i, n in enumerate(required)}
                    sizes = ", ".join(f"{n}: {number}" for n, number in numbers.items())
                    choose = {dotted: f"{{{f'{tag[0]}: {tag[1]}, ' if tag else ''}{sizes}}}"}
                yield from cases(member, dotted, {**(chosen or {}), **choose})


SECTIONS = {}
for _case in cases():
    SECTIONS.setdefault(_case.name.partition(".")[0], []).append(_case)


# What a field is given in a variant of which another has the field, too, of the same type.
SHARED = ("", "null", "[]", "-1", "0.5", "1e30")


def values(section: str) -> Iterator[tuple[Case, str]]:
    """What the fields of a section are given: each type of each field everything."""
    seen = set()
    for case in SECTIONS[section]:
        field = (case.name, str(case.type))
        yield from ((case, value) for value in (SHARED if field in seen else VALUES))
        seen.add(field)


@pytest.fixture
def attempt(run_file, tmp_path, capsys):
    """Gives fields values, and tells what is wrong with how the command line answers; or nothing."""
    jax.devices()
    numbers = iter(range(10**9))

    def give(given: dict[Case, str], taken: list[Run]) -> str | None:
        folder = tmp_path / str(next(numbers))
        options = {name: value for case in given for name, value in case.chosen.items()}
        options |= {case.name: text for case, text in given.items()}
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
        for case, text in given.items():
            value = read(case.type, text)
            has = functools.reduce(operator.getitem, case.name.split("."), plain(taken[-1]))
            if isinstance(value, dict):  # it replaces parts and leaves the others
                ignored = [name for name in value if has.get(name) != value[name]]
            else:
                ignored = has != plain(build(case.type, value))
            if ignored:
                return f"the run has {has!r:.80}"
        written = dataclasses.replace(taken[-1], distributed=Distributed())  # that is of one start
        return None if read_run(folder / "run.yaml") == written else "its file is another run's"

    return give


@pytest.fixture
def take(attempt, monkeypatch):
    """Gives one field a value, trains nothing, and tells what is wrong and whether a run took it."""
    taken: list[Run] = []

    def give(case: Case, value: str) -> tuple[str | None, bool]:
        before = len(taken)
        with monkeypatch.context() as patched:
            patched.setattr(train_command, "train_run", lambda run, *_, **__: taken.append(run) or 0)
            patched.setattr(choices, "_LONG", float("inf"))  # nothing is measured for runs that do not train
            wrong = attempt({case: value}, taken)
        return wrong, len(taken) > before

    return give


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_takes_a_value_or_refuses_it(section, take):
    found = {(c.name, v[:40], *c.chosen.values()): take(c, v)[0] for c, v in values(section)}
    assert not {given: wrong for given, wrong in found.items() if wrong}


class ReachedError(Exception):
    """A run is about to be traced."""


# What no trace depends on.
UNTRACED = ("name", "distributed", "logging", "guard", "deadline", "profile")


def variants() -> dict[str, list[Case]]:
    """The fields that a trace may depend on, by the variant that has them, each once: families share most of theirs."""
    tried, found = set(), {}
    for case in itertools.chain.from_iterable(SECTIONS[section] for section in SECTIONS if section not in UNTRACED):
        if case.name not in {*tried, "data.tokenizer"} and "embedded" not in str(case.chosen):
            tried.add(case.name)
            found.setdefault(", ".join(case.chosen.values()), []).append(case)
    return found


def together(reaches: Callable[..., bool], *given: tuple[Case, str]) -> list[tuple[tuple[Case, str], ...]]:
    """Values that a run takes together, in few groups; one that it refuses is alone."""
    if len(given) < 2 or reaches(*given):
        return [given]
    half, groups = len(given) // 2, []
    for one in (*together(reaches, *given[:half]), *together(reaches, *given[half:])):
        others = (group for group in groups if reaches(*one) and reaches(*group) and reaches(*group, *one))
        known = next(others, ())
        groups = [group for group in groups if group is not known] + [(*known, *one)]
    return groups


@pytest.mark.slow
@pytest.mark.parametrize("variant", range(len(variants())))
def test_what_fields_take_can_be_assembled_and_traced(variant, attempt, take, monkeypatch):
    """What each field takes, and as many of them at once as a run takes together."""
    cases = [*variants().values()][variant]
    if not any(case.name.startswith("model.") for case in cases):
        cases = [dataclasses.replace(case, chosen={"model.layers": "1", **case.chosen}) for case in cases]
    taken: list[Run] = []

    def train(assembled, *_, **__):
        taken.append(assembled.run)
        return loop.Outcome(state=None, step=0, exit_code=0, lines=[], programs=[], token_seconds=None)

    def stop(*_, **__):
        raise ReachedError

    @functools.cache
    def reaches(*given: tuple[Case, str]) -> bool:
        """Whether a run takes them together, by what is known before it is traced."""
        with monkeypatch.context() as patched:
            patched.setattr(summary, "step_program", stop)
            patched.setattr(choices, "_LONG", float("inf"))  # nothing is measured for runs that do not train
            return (attempt(dict(given), taken) or "").startswith("ReachedError")

    def trace(given: dict[Case, str]) -> dict[Case, str]:
        before = len(taken)
        wrong = attempt(given, taken)
        if len(given) < 2 or wrong is None and len(taken) > before:
            return {case: f"{value}: {wrong}" for case, value in given.items() if wrong}
        half = len(given) // 2
        return trace(dict([*given.items()][:half])) | trace(dict([*given.items()][half:]))

    takes = {case: [value for value in EXTREMES if take(case, value)[1]] for case in cases}
    assert any(takes.values()), "the variant itself is refused"
    monkeypatch.setattr(loop, "train", train)
    for number in range(max(map(len, takes.values()))):
        given = [(case, found[number]) for case, found in takes.items() if number < len(found)]
        assert not [wrong for group in together(reaches, *given) if (wrong := trace(dict(group)))]


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
