"""Cases of manual mode: what each device does with its slices, in the notation."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np

from trellis.notation import parse_transition
from trellis.notation.transition import kind_of

from . import whole
from .case import Case, Input
from .layouts import draw_setting, draw_sizes
from .products import letters
from .program import VARIABLE, Dims, Statement, Value, aligned, ordered, without
from .scope import Scope, Unfit

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """How devices hold a value: the mesh axes that slice each dimension, and the states."""

    value: Value
    axes: tuple[Axes, ...]
    pending: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        dims = ["/".join((n, *axes)) for n, axes in zip(self.value.names, self.axes, strict=True)]
        states = [f"+{a}" for a in sorted(self.pending)] + [f"~{a}" for a in sorted(self.copied)]
        return " ".join((*dims, *states))

    @property
    def used(self) -> set[str]:
        return {a for axes in self.axes for a in axes} | self.pending | self.copied

    @property
    def plain(self) -> bool:
        return not self.pending and not self.copied

    def of(self, name: str) -> Axes:
        return self.axes[self.value.axis(name)] if name in self.value.names else ()

    def named(self, value: Value, **changes) -> "Held":
        """Another value that is held alike."""
        return dataclasses.replace(self, value=value, **changes)


@dataclasses.dataclass
class Slices:
    """The slices in sight of a manual program, and the mesh axes that it has taken."""

    s: Scope
    held: list[Held]
    axes: Axes

    def pick(self, test: Callable[[Held], bool] = lambda h: h.plain) -> Held:
        return self.s.one([h for h in self.held if test(h)])

    def step(self, kind: str, held: Held, ours: str, plain: str) -> Statement:
        self.held.append(held)
        var = held.value.var
        if self.s.chance(0.1):
            args = ", ".join(dict.fromkeys(VARIABLE.findall(ours)))
            ours = self.s.one(WRAPPED).format(fn=f"lambda {args}: {ours}", args=args)
        return Statement(kind, (held.value,), (f"{var} = {ours}",), (f"{var} = {plain}",))


WRAPPED = (
    "jax.checkpoint({fn})({args})",
    "jax.jit({fn})({args})",
    "jax.lax.cond(jnp.bool_(True), {fn}, {fn}, {args})",
)
UNARY = ("jnp.tanh({})", "jnp.sin({})", "jax.nn.relu({})", "{} * 0.5", "{} + 1.0", "jnp.sqrt({} * {} + 1.0)")
BINARY = ("{} + {}", "{} * {}", "{} - {}", "jnp.maximum({}, {})", "jnp.where({} > 0.0, {}, 0.5)")


def unary(m: Slices):
    x = m.pick()
    text = m.s.one(UNARY)
    text = text.replace("{}", x.value.var)
    return m.step("elementwise", x.named(m.s.value(x.value.dims)), text, text)


def binary(m: Slices):
    """Of values held alike, or of which one lacks dimensions of the other."""
    x = m.pick()
    y = m.pick(
        lambda h: h.plain and set(h.value.dims) <= set(x.value.dims) and all(h.of(n) == x.of(n) for n in h.value.names)
    )
    a, b = x.value.var, aligned(y.value, x.value.names)
    text = m.s.one(BINARY).format(a, b)
    return m.step("elementwise", x.named(m.s.value(x.value.dims)), text, text)


def reduction(m: Slices):
    """Over a dimension that each device has whole."""
    x = m.pick()
    name = m.s.one([n for n in x.value.names if not x.of(n)])
    i = x.value.axis(name)
    fn = m.s.one(["jnp.sum", "jnp.mean", "jnp.max", "jax.nn.logsumexp"])
    text = f"{fn}({x.value.var}, axis={i})"
    value = m.s.value(without(x.value.dims, name))
    return m.step("reduction", x.named(value, axes=x.axes[:i] + x.axes[i + 1 :]), text, text)


def along(m: Slices):
    x = m.pick()
    name = m.s.one([n for n in x.value.names if not x.of(n)])
    fn = m.s.one(["jax.nn.softmax", "jnp.cumsum", "jnp.sort", "jnp.flip"])
    text = f"{fn}({x.value.var}, axis={x.value.axis(name)})"
    return m.step("along a name", x.named(m.s.value(x.value.dims)), text, text)


def transpose(m: Slices):
    x = m.pick(lambda h: len(h.value.dims) > 1 and not h.copied)
    names = m.s.some(x.value.names, len(x.value.names))
    value = m.s.value(tuple((n, x.value.sizes[n]) for n in names))
    text = ordered(x.value, names)
    return m.step("reshaping", x.named(value, axes=tuple(x.of(n) for n in names)), text, text)


def join(m: Slices):
    """Side by side, along a dimension that each device has whole."""
    x = m.pick()
    name = m.s.one([n for n in x.value.names if not x.of(n)])
    y = m.pick(lambda h: h.plain and h.axes == x.axes and h.value.dims == x.value.dims)
    new = m.s.fresh("n")  # a name has one length in the call, so each stack makes its own
    text = f"jnp.stack([{x.value.var}, {y.value.var}], axis={x.value.axis(name)})"
    i = x.value.axis(name)
    value = m.s.value((*x.value.dims[:i], (new, 2), *x.value.dims[i:]))
    return m.step("joining", x.named(value, axes=(*x.axes[:i], (), *x.axes[i:])), text, text)


def product(m: Slices):
    """What each device can do on its own; sums over sliced names are pending."""
    count = m.s.one([1, 2, 2, 2])
    x = m.pick(lambda h: not h.pending)
    held = [x]
    if count == 2:
        held.append(
            m.pick(
                lambda h: (
                    not h.pending
                    and set(h.value.names) & set(x.value.names)
                    and all(x.value.sizes.get(n, size) == size for n, size in h.value.dims)
                    and all(h.of(n) == x.of(n) for n in h.value.names if n in x.value.names)
                )
            )
        )
    owner: dict[str, str] = {}
    for h in held:
        for n, axes in zip(h.value.names, h.axes, strict=True):
            for a in axes:
                m.s.require(owner.setdefault(a, n) == n)
    m.s.require(all(a in owner for h in held for a in h.copied))
    known: Dims = tuple(dict.fromkeys(dim for h in held for dim in h.value.dims))
    m.s.require(math.prod(size for _, size in known) <= 20000)
    shared = [n for n, _ in known if count == 1 or all(n in h.value.names for h in held)]
    gone = m.s.some(shared, 1, 2) if shared and m.s.chance(0.8) else []
    out = m.s.some([n for n, _ in known if n not in gone], len(known) - len(gone))
    of = {n: next(h.of(n) for h in held if n in h.value.names) for n, _ in known}
    pending = frozenset(a for n in gone for a in of[n])
    value = m.s.value(tuple((n, dict(known)[n]) for n in out))
    result = Held(value, tuple(of[n] for n in out), pending)
    names = ", ".join(h.value.var for h in held)
    text = f"{', '.join(h.text for h in held)} -> {result.text}"
    plain = f'jnp.einsum("{letters([h.value for h in held], out)}", {names})'
    return m.step("product", result, f'tr.einsum("{text}", {names})', plain)


def lookup(m: Slices):
    """Rows by positions, from the end and outside as well; names that both have are aligned."""
    x, s = m.pick(lambda h: not h.pending), m.s
    i = s.between(0, len(x.value.dims) - 1)
    looked_up, size = x.value.dims[i]
    rest = [(dim, axes) for dim, axes in zip(x.value.dims, x.axes, strict=True) if dim[0] != looked_up]
    shared = s.some(rest, 0, 2)
    free = [a for a in m.axes if a not in x.used - x.copied]
    own: list[tuple[tuple[str, int], Axes]] = []
    for _ in range(s.between(0, 2)):
        axes = (free.pop(),) if free and s.chance(0.5) else ()
        parts = math.prod(s.setting.sizes[a] for a in axes)
        own.append(((s.fresh("n"), parts * s.between(1, 3)), axes))
    s.require(x.copied <= {a for _, axes in own for a in axes})
    dims = s.some([*shared, *own], len(shared) + len(own))
    shape = tuple(z for (_, z), _ in dims)
    s.require(math.prod(shape) <= 48)
    numbers = s.rng.integers(-size - 1, size + 2, size=shape)
    text = " ".join("/".join((n, *axes)) for (n, _), axes in dims)
    whole_text = " ".join(n for (n, _), _ in dims)
    ids = f"jnp.asarray({numbers.tolist()}, jnp.int32)"
    ours = ids if text == whole_text else f'tr.reshard("{whole_text} -> {text}", {ids})'
    out = [*rest[:i], *(dim for dim in dims if dim in own), *rest[i:]]
    value = s.value(tuple(dim for dim, _ in out))
    result = Held(value, tuple(axes for _, axes in out), frozenset(x.axes[i]))
    once = Value("", (*(dim for dim, _ in dims), (looked_up, size)))
    hot = f"jax.nn.one_hot(jnp.asarray({np.where(numbers < 0, numbers + size, numbers).tolist()}, jnp.int32), {size})"
    plain = f'jnp.einsum("{letters([x.value, once], list(value.names))}", {x.value.var}, {hot})'
    return m.step("lookup", result, f'tr.take("{x.text}, {text} -> {result.text}", {x.value.var}, {ours})', plain)


VERBS = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}


def reshard(m: Slices):
    """A transition: one thing that a collective does, or two at once."""
    x = m.pick(lambda h: True)
    after = _moved(m, x)
    if m.s.chance(0.2):
        after = _moved(m, after)
    m.s.require(after != x)
    # A copy becomes a slice; whole again it would have another gradient.
    m.s.require(x.copied - after.copied <= {a for axes in after.axes for a in axes})
    after = after.named(m.s.value(x.value.dims))
    kinds = {kind.replace("-", "_") for kind, *_ in kind_of(*parse_transition(f"{x.text} -> {after.text}"))}
    named = kinds if len(kinds) == 1 and kinds <= VERBS else {"reshard"}
    verb = f"tr.{m.s.one(['reshard', *named])}"
    return m.step("reshard", after, f'{verb}("{x.text} -> {after.text}", {x.value.var})', x.value.var)


def _moved(m: Slices, x: Held) -> Held:
    s, free = m.s, [a for a in m.axes if a not in x.used]
    choices = []
    for i, axes in enumerate(x.axes):
        if axes:
            rest = (*x.axes[:i], axes[:-1], *x.axes[i + 1 :])
            choices.append(dataclasses.replace(x, axes=rest))
            if not x.pending:
                choices.append(dataclasses.replace(x, axes=rest, copied=x.copied | {axes[-1]}))
            for j in range(len(rest)):
                if j != i and not x.copied and not x.pending:
                    choices.append(dataclasses.replace(x, axes=(*rest[:j], (*rest[j], axes[-1]), *rest[j + 1 :])))
        for a in free:
            more = (*x.axes[:i], (*axes, a), *x.axes[i + 1 :])
            choices.append(dataclasses.replace(x, axes=more))
        for a in x.pending:
            more = (*x.axes[:i], (*axes, a), *x.axes[i + 1 :])
            choices += [dataclasses.replace(x, axes=more, pending=x.pending - {a})] * 2
        for a in x.copied:
            more = (*x.axes[:i], (*axes, a), *x.axes[i + 1 :])
            choices.append(dataclasses.replace(x, axes=more, copied=x.copied - {a}))
    choices += [dataclasses.replace(x, pending=x.pending - {a}) for a in x.pending] * 2
    if not x.pending:
        choices += [dataclasses.replace(x, copied=x.copied | {a}) for a in free]
    found = s.one(choices)
    sizes = s.setting.sizes
    s.require(
        all(z % math.prod(sizes[a] for a in axes) == 0 for z, axes in zip(x.value.shape, found.axes, strict=True))
    )
    return found


def linear(m: Slices):
    """What may be done to a pending sum."""
    x = m.pick(lambda h: bool(h.pending))
    var, s = x.value.var, m.s
    same = [h for h in m.held if h != x and (h.axes, h.pending, h.value.dims) == (x.axes, x.pending, x.value.dims)]
    if same and s.chance(0.7):
        text = f"{var} + {s.one(same).value.var}"
        return m.step("pending sum", x.named(s.value(x.value.dims)), text, text)
    if s.chance(0.5):
        text = f"{var} + {var}"
        return m.step("pending sum", x.named(s.value(x.value.dims)), text, text)
    name = s.one([n for n in x.value.names if not x.of(n)])
    i = x.value.axis(name)
    text = f"jnp.sum({var}, axis={i})"
    value = s.value(without(x.value.dims, name))
    return m.step("pending sum", x.named(value, axes=x.axes[:i] + x.axes[i + 1 :]), text, text)


def shift(m: Slices):
    """Slices passed around a ring."""
    x = m.pick(lambda h: h.plain and any(h.axes))
    i = m.s.one([i for i, axes in enumerate(x.axes) if len(axes) == 1])
    (axis,) = x.axes[i]
    chunk = x.value.shape[i] // m.s.setting.sizes[axis]
    by = m.s.between(1, 2)
    plain = f"jnp.roll({x.value.var}, {chunk * by}, axis={i})"
    ours = f'tr.shift("{x.text}", {x.value.var}, "{axis}"' + (f", by={by})" if by > 1 else ")")
    return m.step("shift", x.named(m.s.value(x.value.dims)), ours, plain)


STEPS = (unary, unary, binary, binary, reduction, along, transpose, join, product, product, product, product,
         reshard, reshard, reshard, reshard, linear, linear, shift, lookup, lookup)  # fmt: skip


def draw(seed: int, many: bool = False) -> Case:
    """The manual case of a seed."""
    rng = np.random.default_rng([seed, 2])
    for _ in range(100):
        try:
            return _named(rng, seed, many) if rng.random() < 0.3 else draw_plain(rng, seed, many)
        except Unfit:
            continue
    raise Unfit


def draw_plain(rng, seed: int, many: bool = False) -> Case:
    """A program of plain arrays, written in the notation."""
    setting = draw_setting(rng, "manual", many=many)
    sizes, counter = draw_sizes(rng, setting), itertools.count(1)
    axes = [a for a, _ in setting.mesh]
    left = len(axes) > 1 and rng.random() < 0.25  # to the surrounding program
    m = Slices(Scope(rng, setting, sizes, [], counter), [], tuple(axes[:1] if left else axes))
    names = list(rng.permutation(list(sizes)))[:4]
    for _ in range(int(rng.integers(2, 4))):
        dims = tuple((str(n), sizes[n]) for n in rng.permutation(names)[: int(rng.choice([1, 2, 2, 3]))])
        m.held.append(_sliced(rng, m, Value(f"x{next(counter)}", dims)))
    params = list(m.held)
    statements = []
    for _ in range(200):
        if len(statements) >= rng.integers(3, 9):
            break
        try:
            statements.append(m.s.one(STEPS)(m))
        except Unfit:
            continue
    results = [h for h in m.held if h not in params]
    if not results:
        raise Unfit
    for h in [h for h in results[-2:] if not h.plain]:  # what is left pending is settled
        value = m.s.value(h.value.dims)
        if h.copied:
            results.remove(h)
            continue
        after = h.named(value, pending=frozenset())
        statements.append(
            m.step("reshard", after, f'tr.reshard("{h.text} -> {after.text}", {h.value.var})', h.value.var)
        )
        results.append(after)
    outputs = [h for h in results if h.plain][-2:]
    m.s.require(bool(outputs))
    inputs = tuple(Input(h.value, _put(h)) for h in params)
    annotations = tuple(f'f32["{h.text}"]' for h in params), tuple(f'f32["{h.text}"]' for h in outputs)
    return Case(
        seed, setting, inputs, tuple(statements), tuple(h.value for h in outputs), _run(rng),
        str(rng.choice(["none", "reverse", "reverse", "forward"])), annotations=annotations,
        axes=f'(axes={{"{axes[0]}"}})' if left else "",
    ).pruned()  # fmt: skip


def _run(rng) -> str:
    return str(rng.choice(["jax.jit", "jax.jit", "jax.jit", "eager"]))


def _sliced(rng, m: Slices, value: Value) -> Held:
    setting, left = m.s.setting, [str(a) for a in rng.permutation(m.axes)]
    axes = []
    for _, size in value.dims:
        mine: Axes = ()
        while left and rng.random() < (0.55 if not mine else 0.2):
            parts = math.prod(setting.sizes[a] for a in (*mine, left[0]))
            if size % parts:
                break
            mine = (*mine, left.pop(0))
        axes.append(mine)
    return Held(value, tuple(axes))


def _put(held: Held) -> str:
    spec = ", ".join(
        "None" if not axes else f'"{axes[0]}"' if len(axes) == 1 else str(tuple(axes)) for axes in held.axes
    )
    return f"jax.device_put({held.value.var}, jax.NamedSharding(mesh, jax.P({spec})))"


def _named(rng, seed: int, many: bool) -> Case:
    """A program of named arrays, on slices of one name or two."""
    inner = int(rng.integers(2**31))
    case, scope = whole.draw_with_scope(inner, "manual", many=many)
    case = case.pruned()
    setting, sizes = case.setting, scope.sizes
    names = [n for n in sizes if any(n in x.value.names for x in case.inputs)]
    axes = [a for a, size in setting.mesh if size > 1]
    if not names or not axes:
        raise Unfit
    slices = dict(zip(rng.permutation(names)[: int(rng.integers(1, 3))], axes, strict=False))
    whole_names = {n: size for x in case.inputs for n, size in x.value.dims}
    held = lambda v: Held(
        v,
        tuple(
            (slices[n],) if n in slices and whole_names.get(n) == size and size % setting.sizes[slices[n]] == 0 else ()
            for n, size in v.dims
        ),
    )
    inputs = tuple(
        dataclasses.replace(x, placing=f'tr.named({_put(held(x.value))}, "{" ".join(x.value.names)}")')
        for x in case.inputs
    )
    kind = {"f32": "f32", "bf16": "bf16", "i32": "i32", "bool": "bool_"}
    typed = lambda v: f'{kind[v.dtype]}["{held(v).text}"]'
    annotations = tuple(typed(x.value) for x in case.inputs), tuple(typed(v) for v in case.outputs)
    derivative = case.derivative if case.floats() else "none"
    return dataclasses.replace(case, seed=seed, inputs=inputs, annotations=annotations, derivative=derivative)
