"""Rules of Optax that know nothing of slices, run as on a mesh of automatic axes."""

from typing import Any

import jax
import optax

from trellis.mesh.reshard import place
from trellis.notation import spec_of
from trellis.notation.state import mode_of, state_of


def by_compiler(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """A rule whose update leaves the explicit mesh axes to the compiler.

    Optax's rules that multiply, reshape or choose between whole arrays (`contrib.muon`, `contrib.prodigy`, `lbfgs`,
    `apply_if_finite`, among others) end in errors of JAX's types on sliced parameters. Inside such an update types say
    nothing, as on a mesh of automatic axes, and the compiler moves what the rule needs. What comes out has a type
    again: updates are sliced like the parameters, and the state stays where it was.

    >>> rule, params = by_compiler(optax.contrib.prodigy()), {"w": tr.ones({"embed": 2})}
    >>> updates, state = rule.update(params, rule.init(params), params)
    >>> print(tr.typeof(updates["w"]))
    f32[embed=2]

    Args:
        rule: an Optax transformation. If its state has arrays of other shapes, it needs `on_arrays` too, inside:
            `by_compiler(on_arrays(rule))`.

    Moves: what the compiler chooses.
    """
    inner = optax.with_extra_args_support(rule)

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        if mode_of(jax.sharding.get_abstract_mesh()) != "explicit":
            return inner.update(updates, state, params, **more)
        leaves, structure = jax.tree.flatten((updates, state, params, more))
        given = {i: _settled(x) for i, x in enumerate(leaves) if isinstance(x, jax.Array)}
        results = (updates if params is None else params, state)
        specs = [_spec(x) for x in jax.tree.leaves(results)]

        def run(*arrays):
            now = dict(zip(given, arrays, strict=True))
            updates, state, params, more = jax.tree.unflatten(structure, [now.get(i, x) for i, x in enumerate(leaves)])
            return tuple(jax.tree.leaves(inner.update(updates, state, params, **more)))

        made = jax.sharding.auto_axes(run, out_sharding=tuple(specs))(*given.values())
        return jax.tree.unflatten(jax.tree.structure(results), made)

    return optax.GradientTransformationExtraArgs(rule.init, update)


def _settled(x: jax.Array) -> jax.Array:
    """An array as the compiler takes it: on the mesh, without partial sums and copies."""
    held = state_of(x)
    return jax.reshard(x, jax.P()) if held.mode == "none" else place(x, held.axes)


def _spec(x: Any) -> jax.P:
    return spec_of(state_of(x).axes) if isinstance(x, jax.Array) else jax.P()
