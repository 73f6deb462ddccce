"""Cases of whole arrays: named arrays under a layout, on a mesh without one, or alone."""

import dataclasses
import itertools

import numpy as np

from . import control, copies, elementwise, indexing, language, modules, products, randomness, reducing, reshaping
from .case import Case, Input
from .layouts import Setting, draw_setting, draw_sizes, entries_text
from .program import Value
from .scope import Scope, Unfit

GROUPS = (
    (elementwise, 5), (reducing, 3), (products, 4), (indexing, 3), (reshaping, 4), (randomness, 1), (control, 3),
    (modules, 2), (language, 1), (copies, 1),
)  # fmt: skip
MODES = ("explicit",) * 12 + ("auto",) * 3 + ("types",) * 2 + ("alone",) * 2


def draw(seed: int, mode: str | None = None, *, many: bool = False) -> Case:
    """The case of a seed."""
    case = draw_with_scope(seed, mode, many=many)[0].pruned()
    return case if case.floats() else dataclasses.replace(case, derivative="none")


def draw_with_scope(
    seed: int, mode: str | None = None, *, many: bool = False, short: bool = False
) -> tuple[Case, Scope]:
    """The case of a seed, and what further statements would be drawn from."""
    rng = np.random.default_rng(seed)
    mode = mode or MODES[rng.integers(len(MODES))]
    setting = draw_setting(rng, mode, many=many)
    sizes = draw_sizes(rng, setting)
    counter = itertools.count(1)
    run = str(rng.choice(["jax.jit"] * 4 + ["tr.named_jit"] * 2 + ["eager"]))
    derivative = str(rng.choice(["none", "reverse", "reverse", "reverse", "forward"]))
    inputs = draw_inputs(rng, setting, sizes, counter)
    scope = Scope(
        rng, setting, sizes, [x.value for x in inputs], counter, traced=run != "eager", reversed=derivative != "forward"
    )
    statements = grow(scope, int(rng.integers(0, 3) if short else rng.integers(2, 9)))
    outputs = draw_outputs(scope, statements)
    case = Case(seed, setting, tuple(inputs), tuple(statements), outputs, run, derivative)
    if mode in ("explicit", "auto") and not short and rng.random() < 0.08:
        case = dataclasses.replace(case, earlier=earlier(rng, setting))
    return case, scope


def earlier(rng, setting: Setting) -> Setting:
    """Another layout on the same mesh."""
    other = draw_setting(rng, setting.mode, setting.mesh)
    return dataclasses.replace(other, options=("strict=True",) if rng.random() < 0.2 else ())


def grow(scope: Scope, count: int) -> list:
    """Adds so many statements to a scope; each that is tried and does not fit is drawn again."""
    statements = []
    modules = [module for module, weight in GROUPS for _ in range(weight)]
    for _ in range(count * 40):
        if len(statements) == count:
            break
        module = scope.one(modules)
        try:
            made = scope.one(module.STEPS)
            statement = made(scope, grow) if module is control else made(scope)
        except Unfit:
            continue
        statements.append(statement)
        scope.values.extend(statement.results)
    return statements


def draw_outputs(scope: Scope, statements) -> tuple[Value, ...]:
    """The last results that nothing uses, and one more."""
    used = set().union(*(s.uses() for s in statements)) if statements else set()
    made = [v for s in statements for v in s.results]
    ends = [v for v in made if v.var not in used] or scope.values[-1:]
    return tuple(ends[-3:])


def draw_inputs(rng, setting: Setting, sizes: dict[str, int], counter) -> list[Input]:
    """Two to four floats, and now and then positions and truth values."""
    inputs = []
    names = list(rng.permutation(list(sizes)))[: int(rng.integers(2, 5))]
    kinds = ["f32"] * int(rng.integers(2, 4)) + [k for k, p in (("i32", 0.5), ("bool", 0.25)) if rng.random() < p]
    for kind in kinds:
        rank = int(rng.choice([1, 2, 2, 3] if kind == "f32" else [1, 1, 2]))
        dims = tuple((str(n), sizes[n]) for n in rng.permutation(names)[:rank])
        below = int(rng.choice([sizes[n] for n in names])) if kind == "i32" else 0
        value = Value(f"x{next(counter)}", dims, kind, below)
        inputs.append(draw_placing(rng, setting, value))
    return inputs


def draw_placing(rng, setting: Setting, value: Value) -> Input:
    """Where an argument is when the program starts."""
    plain = f'tr.named({value.var}, "{" ".join(value.names)}")'
    on_a_device = plain.replace(value.var, f"jnp.asarray({value.var})", 1)
    if setting.mode == "alone":
        return Input(value, plain if rng.random() < 0.3 else on_a_device)
    if setting.mode == "types":
        return Input(value, _put(rng, setting, value))
    entries = [(n, (str(rng.choice([a for a, _ in setting.mesh])),)) for n in value.names if rng.random() < 0.5]
    entries = [(n, axes) for n, axes in entries if value.sizes[n] % setting.sizes[axes[0]] == 0]
    choices = {
        f"tr.shard({plain})": 0.3,
        f'tr.shard({plain}, "compute")': 0.35,
        f"tr.shard({plain}, {entries_text(tuple(entries))})": 0.1,
        f'tr.from_numpy({value.var}, "{" ".join(value.names)}")': 0.1,
        plain: 0.05,
        on_a_device: 0.05,
    }
    texts, shares = list(choices), list(choices.values())
    index = int(rng.choice(len(texts) + 1, p=[*shares, 1 - sum(shares)]))
    if index == len(texts):
        return Input(value, on_a_device, outside=True)
    return Input(value, texts[index])


def _put(rng, setting: Setting, value: Value) -> str:
    """A sharding of its own, without a layout."""
    left = [str(axis) for axis in rng.permutation([a for a, _ in setting.mesh])]
    spec = []
    for _, size in value.dims:
        axis = left[0] if left else ""
        if left and rng.random() < 0.6 and size % setting.sizes[axis] == 0:
            spec.append(f'"{left.pop(0)}"')
        else:
            spec.append("None")
    put = f"jax.device_put({value.var}, jax.NamedSharding(mesh, jax.P({', '.join(spec)})))"
    return f'tr.named({put}, "{" ".join(value.names)}")'
