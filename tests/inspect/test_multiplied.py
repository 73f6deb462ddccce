"""What a parameter is declared for is what the program does with it: weights are operands of products."""

import jax
import jax.numpy as jnp
import pytest

import trellis as tr
from tests.models.small import CONFIGS
from trellis.data import Batch
from trellis.inspect.work import PRODUCTS
from trellis.nn.parameters import Role, parameters
from trellis.program import trace
from trellis.program.flow import origin
from trellis.train.step import StepOptions, batch_loss


def multiplied(program) -> set[str]:
    """Names of the parameters that multiply activations, on whatever way of casts, views, parts and loops."""
    names = {value: argument.name for value, argument in zip(program.inputs, program.arguments)}
    found = set()
    for operation in program.walk():
        if operation.name in PRODUCTS:
            (summed, _), _ = operation.params.get("dimension_numbers", (((0,), ()), ()))
            own = [names[root] for value in operation.operands[:2] if (root := origin(value)) in names]
            found |= set(own) if len(own) == 1 and summed else set()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_declared_roles_are_what_the_program_does(name):
    model = jax.eval_shape(lambda: CONFIGS[name].init(key=jax.random.key(0), vocab_multiple=8))
    ids = tr.named(jnp.zeros((2, 8), jnp.int32), "batch pos")
    batch = Batch(tokens=ids, targets=ids, loss_mask=ids.astype(bool), segment_ids=None, positions=None)
    program = trace(lambda model: batch_loss(model, batch, StepOptions())[0].total, model)
    declared = {p.path for p in parameters(model) if p.role == Role.WEIGHT}
    tied = {"embedding"} if model.unembedding is model.embedding else set()  # looked up, and multiplied in the loss
    # Which expert's bias a token gets is picked by a product with its weights.
    picked = {p.path for p in parameters(model) if p.role == Role.BIAS and {"experts", "routes"} & set(p.names)}
    assert multiplied(program) - picked == declared | tied
