"""Reading a traced train step: sizes on one device, where an equation comes from, what depends on what.

Nothing here needs a device: the mesh can be a `jax.sharding.AbstractMesh`, the arguments `jax.ShapeDtypeStruct`s.
"""

import dataclasses
import functools
import linecache
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters.partial_eval import dce_jaxpr

from trellis.inspect.ledger import ledger
from trellis.inspect.rows import Ledger
from trellis.inspect.source import source_of

Jaxpr = Any
Var = Any


@dataclasses.dataclass(frozen=True)
class Step:
    """A train step, traced: what every part of a plan is made from.

    Attributes:
        jaxpr: the whole step, gradients and optimizer included.
        kinds: for each input of the jaxpr, "parameters", "optimizer", "batch" or "other".
        names: for each input, its path.
        donated: for each input, whether its memory may be reused.
        mesh: mesh axes and their sizes.
        tokens: tokens of one step, over all devices.
    """

    jaxpr: Any
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    donated: tuple[bool, ...]
    mesh: Mapping[str, int]
    tokens: int


def trace_step(
    step: Callable, state: Any, batch: Any, *, mesh: Mapping[str, int], tokens: int, kind_of: Callable[[str], str]
) -> Step:
    """Traces `step(state, batch)`; nothing runs and nothing is allocated.

    Args:
        step: the train step, jitted or not.
        state: its state, as arrays or `jax.ShapeDtypeStruct`s that carry shardings.
        batch: likewise.
        mesh: mesh axes and their sizes.
        tokens: tokens of one step.
        kind_of: "parameters", "optimizer" or "other" for the path of a leaf of the state.
    """
    traced = (step if hasattr(step, "trace") else jax.jit(step)).trace(state, batch)
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    extra = [f"batch{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]]
    jaxpr = traced.jaxpr
    live, _ = dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=True)
    jaxpr = jex_core.ClosedJaxpr(live, jaxpr.consts)
    names, kinds = (names + extra), [kind_of(name) for name in names] + ["batch"] * len(extra)
    donated = [True] * len(leaves) + [False] * len(extra)
    missing = len(jaxpr.jaxpr.invars) - len(names)
    if missing:  # constants that tracing lifted to arguments come first
        names = [f"constant {i}" for i in range(missing)] + names
        kinds, donated = ["other"] * missing + kinds, [False] * missing + donated
    return Step(jaxpr, tuple(kinds), tuple(names), tuple(donated), dict(mesh), tokens)


def ledger_of(step: Step) -> Ledger:
    """The communication of a traced step, without tracing it again."""
    shaped = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=getattr(v.aval, "sharding", None))
        for v in step.jaxpr.jaxpr.invars
    ]
    return ledger(jex_core.jaxpr_as_fun(step.jaxpr), *shaped)


def local_shape(aval: Any) -> tuple[int, ...]:
    """The shape on one device of a value whose type carries its sharding."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return tuple(aval.shape)
    sizes = dict(sharding.mesh.shape)
    partitions = tuple(sharding.spec.partitions) if hasattr(sharding.spec, "partitions") else tuple(sharding.spec)
    shape = list(aval.shape)
    for i, entry in enumerate(partitions):
        axes = entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
        shape[i] = -(-shape[i] // math.prod(sizes.get(axis, 1) for axis in axes))
    return tuple(shape)


def itemsize(dtype: Any) -> float:
    """Bytes of one element; random keys count as their two words."""
    try:
        return jax.dtypes.itemsize_bits(dtype) / 8
    except (TypeError, ValueError, AttributeError):
        try:
            return np.dtype(dtype).itemsize
        except TypeError:
            return 8


def local_elements(aval: Any) -> int:
    """Elements on one device."""
    return math.prod(local_shape(aval)) if hasattr(aval, "shape") else 0


def local_bytes(aval: Any) -> int:
    """Bytes on one device."""
    return int(local_elements(aval) * itemsize(aval.dtype)) if hasattr(aval, "dtype") else 0


def sub_jaxprs(eqn: Any) -> Iterator[tuple[str, Jaxpr]]:
    """The programs inside an equation, by the parameter that holds them; closed ones opened."""
    for name, value in eqn.params.items():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jex_core.ClosedJaxpr):
                yield name, item.jaxpr
            elif isinstance(item, jex_core.Jaxpr):
                yield name, item


# Equations that are just another name for the program inside them.
INLINE = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "shard_map": "jaxpr",
    "run_state": "jaxpr",
}
# Kernels: one call to the device, whatever the program inside says.
KERNELS = {"pallas_call", "custom_call", "ffi_call", "tpu_custom_call", "dot_product_attention_fwd_wrapper",
           "dot_product_attention_bwd_wrapper", "dot_product_attention_fwd", "dot_product_attention_bwd"}  # fmt: skip


def inlined(eqn: Any) -> Jaxpr | None:
    """The program an equation stands for, where it is only a wrapper."""
    if eqn.primitive.name in KERNELS:
        return None
    key = INLINE.get(eqn.primitive.name)
    if key is None or key not in eqn.params:
        return None
    inner = eqn.params[key]
    return inner.jaxpr if isinstance(inner, jex_core.ClosedJaxpr) else inner


def is_literal(var: Var) -> bool:
    """Whether a jaxpr's atom is a constant written in place."""
    return isinstance(var, jex_core.Literal)


@functools.lru_cache(maxsize=8192)
def _label(file: str, line: int, function: str) -> str:
    owner, _, method = function.rpartition(".")
    parts = re.findall(r"self\.(\w+)", linecache.getline(file, line))
    owner = owner.rpartition(".")[2] if not owner.endswith("<locals>") else ""
    if owner and parts:
        return f"{owner} {parts[-1]}"
    name = method if method not in ("__call__", "<lambda>") else owner or method
    return owner if owner and method == "__call__" else f"{owner} {name}".strip()


def label_of(eqn: Any) -> str:
    """What a person would call an equation: the class and the attribute on its line, or the function it is in.

    `gate = einsum("...", x, self.gate)` in `GatedMlp.__call__` is `GatedMlp gate`.
    """
    where = source_of(eqn)
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if where and traceback is not None else ():
        if where.startswith(f"{os.path.basename(frame.file_name)}:{frame.line_num} ") or where == (
            f"{os.path.basename(frame.file_name)}:{frame.line_num}"
        ):
            return _label(frame.file_name, frame.line_num, frame.function_name)
    return ""


def reached(jaxpr: Jaxpr, marked: list[bool]) -> set[Var]:
    """The values of a program that depend on its marked inputs."""
    hot = {var for var, mark in zip(jaxpr.invars, marked) if mark}
    for eqn in jaxpr.eqns:
        if any(not is_literal(v) and v in hot for v in eqn.invars):
            hot.update(eqn.outvars)
    return hot


def needed(jaxpr: Jaxpr, wanted: list[bool]) -> set[Var]:
    """The values of a program that its wanted outputs depend on."""
    want = {var for var, mark in zip(jaxpr.outvars, wanted) if mark and not is_literal(var)}
    for eqn in reversed(jaxpr.eqns):
        if any(var in want for var in eqn.outvars):
            want.update(v for v in eqn.invars if not is_literal(v))
    return want
