"""Manual cases with one mistake in a text: a mesh axis or a state too many, too few or another, or a reshard forgotten.

The plain program stays as it is, so that what is not refused must be right all the same.
"""

import dataclasses
import re

import numpy as np

from . import manual
from .case import Case
from .program import Statement
from .scope import Unfit

TEXT = re.compile(r'"([^"]*)"')
NONLINEAR = (
    "jnp.tanh({})", "{0} * {0}", "jnp.max({})", "{} + 1.0", "jnp.abs({})", "jnp.where({} > 0.0, 1.0, 0.0)",
    "jnp.sort({})", "jnp.round({})", "jnp.pad({}, 1, constant_values=2.0)", "jnp.cumsum({})", "-{}", "{} * 0.5",
    "jax.lax.stop_gradient({}) + 1.0", "jnp.mean({})", "1.0 / {}", "jnp.argmax({}).astype(jnp.float32)",
)  # fmt: skip

# A name that a stack has made, whose length no other text says: sliced over more mesh axes it is another program, no
# mistake.
MADE = re.compile(r"n\d+\b")
ALONG = ("jnp.sort({})", "jnp.cumsum({})")  # what there is a dimension for
LINEAR = ("jnp.cumsum({})", "jnp.mean({})")  # of partial sums no mistake, and of slices each device's own


def draw(seed: int, many: bool = False) -> Case:
    """A manual case with a mistake."""
    rng = np.random.default_rng([seed, 4])
    for _ in range(100):
        mistake = (text, text, text, annotation, forgotten, nonlinear, exchanged)[rng.integers(7)]
        try:
            case = manual.draw_plain(rng, seed, many)
            broken = mistake(rng, case)
        except Unfit:
            continue
        if broken != case:
            derivative = case.derivative if rng.random() < 0.3 else "none"
            return dataclasses.replace(broken, broken="a mistake in a text", derivative=derivative)
    raise Unfit


def _one(rng, choices):
    if not choices:
        raise Unfit
    return choices[int(rng.integers(len(choices)))]


def changed(rng, shape: str, axes: list[str]) -> str:
    """A text with one mesh axis or state too many, too few, or another."""
    tokens = re.split(r"(,? +)", shape)
    places = [i for i, t in enumerate(tokens) if re.match(r"[\w+~]", t)]
    i = _one(rng, places)
    token, axis = tokens[i], _one(rng, axes)
    match int(rng.integers(5)):
        case 0 if "/" in token:
            tokens[i] = token.rpartition("/")[0]
        case 0 if token[0] in "+~":
            tokens[i] = ""
        case 1 if token[0] not in "+~" and not MADE.match(token):
            tokens[i] = f"{token}/{axis}"
        case 2:
            sign = _one(rng, ["+", "~"])
            tokens[i] = f"{token} {sign}{axis}"
        case 3 if token[0] in "+~":
            tokens[i] = ("~" if token[0] == "+" else "+") + token[1:]
        case 3 if "/" in token:
            tokens[i] = f"{token.rpartition('/')[0]}/{_one(rng, [*axes, 'nowhere'])}"
        case 4 if token.count("/") == 2:
            name, a, b = token.split("/")
            tokens[i] = f"{name}/{b}/{a}"
    return re.sub(" +", " ", "".join(tokens)).strip()


def text(rng, case: Case) -> Case:
    """A mistake in the text of a product, a reshard or a shift."""
    i = _one(rng, [i for i, s in enumerate(case.statements) if TEXT.search(s.ours[0])])
    statement = case.statements[i]
    line = statement.ours[0]
    found = _one(rng, list(TEXT.finditer(line)))
    left, arrow, right = found[1].partition("->")
    axes = [axis for axis, _ in case.setting.mesh]
    if rng.random() < 0.5 or not arrow:
        left = changed(rng, left, axes) + (" " if arrow else "")
    else:
        right = " " + changed(rng, right, axes)
    line = f'{line[: found.start()]}"{left}{arrow}{right}"{line[found.end() :]}'
    statement = dataclasses.replace(statement, ours=(line,))
    return dataclasses.replace(case, statements=(*case.statements[:i], statement, *case.statements[i + 1 :]))


def annotation(rng, case: Case) -> Case:
    """A mistake in the type of an argument or a result."""
    sides = [list(side) for side in case.annotations]
    side = sides[rng.integers(2)]
    i = int(rng.integers(len(side)))
    axes = [axis for axis, _ in case.setting.mesh]
    side[i] = TEXT.sub(lambda m: f'"{changed(rng, m[1], axes)}"', side[i])
    return dataclasses.replace(case, annotations=tuple(map(tuple, sides)))


def exchanged(rng, case: Case) -> Case:
    """Two mesh axes exchanged in one text: another order on a name, or each on the other's name. No type tells."""
    several = [axis for axis, size in case.setting.mesh if size > 1]
    places = [
        (i, shape)
        for i, text in enumerate((*(s.ours[0] for s in case.statements), *case.annotations[1]))
        for shape in re.split(r" -> |, (?=\w)", TEXT.search(text)[1] if TEXT.search(text) else "")
        if sum(f"/{axis}" in shape for axis in several) > 1
    ]
    i, shape = _one(rng, places)
    one, other = rng.permutation([axis for axis in several if f"/{axis}" in shape])[:2]
    swap = {one: other, other: one}
    new = re.sub(r"/(\w+)", lambda m: "/" + swap.get(m[1], m[1]), shape)
    statements, results = list(case.statements), list(case.annotations[1])
    if i < len(statements):
        line = statements[i].ours[0].replace(shape, new, 1)
        statements[i] = dataclasses.replace(statements[i], ours=(line,))
    else:
        results[i - len(statements)] = results[i - len(statements)].replace(shape, new, 1)
    return dataclasses.replace(case, statements=tuple(statements), annotations=(case.annotations[0], tuple(results)))


def forgotten(rng, case: Case) -> Case:
    """A reshard left out."""
    i = _one(rng, [i for i, s in enumerate(case.statements) if s.kind == "reshard"])
    statement = case.statements[i]
    statement = dataclasses.replace(statement, ours=statement.plain)
    return dataclasses.replace(case, statements=(*case.statements[:i], statement, *case.statements[i + 1 :]))


def nonlinear(rng, case: Case) -> Case:
    """Something else than a sum, done before a pending sum is settled."""
    several = [axis for axis, size in case.setting.mesh if size > 1]
    sums = [s.kind == "reshard" and any(f"+{a}" in s.ours[0].split("->")[0] for a in several) for s in case.statements]
    i = _one(rng, [i for i, pending in enumerate(sums) if pending])
    statement = case.statements[i]
    var = statement.plain[0].partition(" = ")[2]
    left_out = () if statement.results[0].dims else ALONG
    left_out += LINEAR if "/" in statement.ours[0].split("->")[0] else ()
    fn = _one(rng, [fn for fn in NONLINEAR if fn not in left_out]).format(var)
    elementwise = fn if "max" not in fn and "mean" not in fn and "pad" not in fn else f"{var} + {fn}"
    if "pad" in fn:
        elementwise = f"{var} + jnp.sum({fn})"
    before = Statement("nonlinear on partial sums", (), (f"{var} = {elementwise}",), (f"{var} = {elementwise}",))
    return dataclasses.replace(case, statements=(*case.statements[:i], before, *case.statements[i:]))
