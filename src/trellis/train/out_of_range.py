"""The first weight or gradient of a step with a number that is not finite: its name and its layer.

A step goes through the model forward and then backward. So weights come first, from the embedding on, and then
gradients, from the end of the model back: a number that is not finite makes everything after it not finite.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trellis.mesh.reshard import place
from trellis.named import is_named
from trellis.nn.parameters import Parameter, parameters

_NONE = -1.0


def first_out_of_range(model: Any, gradients: Any) -> jax.Array:
    """The index of the first tensor with a number that is not finite, `f32[""]`, for `named_tensor`; -1 for none.

    Args:
        model: the parameters that the step was made with.
        gradients: their gradients.
    """
    order = _order(model)
    flags = [jnp.concatenate([_flags(p) for p in parameters(tree)]) for tree in (model, gradients)]
    found = jnp.concatenate([flags[0][np.array(order)], flags[1][np.array(order[::-1])]])
    return jnp.where(found.any(), jnp.argmax(found).astype(jnp.float32), _NONE)


def named_tensor(model: Any, number: float) -> str:
    """What `first_out_of_range` found, in words; "" for none.

    Args:
        model: the parameters, or their types.
        number: what was found.
    """
    if number < 0:
        return ""
    names = [
        f"`{p.path}`" + (f" of layer {layer}" if p.is_stacked else "")
        for p in parameters(model)
        for layer in range(_layers(p))
    ]
    order = _order(model)
    which, place = divmod(int(number), len(order))
    return f"the gradient of {names[order[::-1][place]]}" if which else f"the weight {names[order[place]]}"


def _order(model: Any) -> list[int]:
    """The tensors of a model, one for each layer, as a forward pass meets them: their indices in the list of all
    parameters, layer after layer of each."""
    keys, segment, before = [], 0, False
    for number, p in enumerate(parameters(model)):
        segment += p.is_stacked != before
        before = p.is_stacked
        keys += [(segment, layer, number) for layer in range(_layers(p))]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _layers(p: Parameter) -> int:
    return p.leaf.shape["layers"] if p.is_stacked else 1


def _flags(p: Parameter) -> jax.Array:
    """Which layers of a parameter, or of its gradient, have a number that is not finite: `bool["layers"]`."""
    array = p.leaf.array if is_named(p.leaf) else p.leaf
    kept = 1 if p.is_stacked else 0
    bad = jnp.max((~jnp.isfinite(array)).astype(jnp.float32), axis=tuple(range(kept, array.ndim)))
    return place(bad, ((),) * kept, names=("layers",)[:kept]).reshape(-1) > 0
