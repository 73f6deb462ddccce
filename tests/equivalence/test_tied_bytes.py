"""A table that is embedding and unembedding at once moves as one parameter: by the ledger and in the compiled program.

Under FSDP on n devices each parameter is gathered once (no layer is computed again here) and its gradient scattered
once, (n - 1) / n of its bytes each. Two lookups of a table would scatter two gradients of it.
"""

import jax
import pytest

import trellis as tr
from tests.equivalence import own_gpt
from tests.equivalence.test_models import FAMILIES, LAYOUTS, batch
from tests.equivalence.test_own_gpt import inputs
from trellis.data.batch import Batch
from trellis.inspect import collectives
from trellis.named import is_named
from trellis.run.layouts import make_layout
from trellis.train.step import StepOptions, loss_and_gradients


def parts(tree) -> tuple[int, int]:
    """Seven eighths of the bytes of all parameters that are sliced, and of the others, which have no `embed`."""
    arrays = jax.tree.leaves(tree, is_leaf=is_named)
    num_bytes = lambda sliced: sum(x.size * x.dtype.itemsize for x in arrays if ("embed" in x.names) == sliced)
    return 7 * num_bytes(True) // 8, 7 * num_bytes(False) // 8


def of_parameters(ledger, scatters: str) -> dict[str, int]:
    """Bytes on the wire by kind, without the sums of the loss, at most eight numbers at a time."""
    found = {"all-gather": 0, scatters: 0}
    for row in ledger.rows:
        if row.payload > 32:
            found[row.kind] = found.get(row.kind, 0) + row.wire * row.times
    return found


def once(model) -> dict[str, int]:
    """Each sliced parameter is gathered once, its gradient scattered once; the others' gradients are summed."""
    sliced, whole = parts(model)
    return {"all-gather": sliced, "reduce-scatter": sliced} | ({"all-reduce": 2 * whole} if whole else {})


@pytest.fixture
def fsdp():
    sizes, choice = LAYOUTS["fsdp"]
    with make_layout(sizes, choice, jax.devices()) as layout:
        yield layout


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model(family, fsdp):
    model = jax.eval_shape(lambda: FAMILIES[family].init(key=jax.random.key(0), vocab_multiple=8))
    assert model.config.tie_embeddings
    args = tr.abstract(model, "params"), tr.abstract(Batch(**batch()).named(), "compute")
    step = lambda model, batch: loss_and_gradients(model, batch, StepOptions())
    assert of_parameters(tr.ledger(step, *args), "reduce-scatter") == once(model)
    sliced, whole = parts(model)
    compiled = collectives(jax.jit(step).lower(*args).compile(), fsdp.mesh)
    # XLA writes a scatter on a CPU as an all-reduce, of twice the bytes.
    assert of_parameters(compiled, "all-reduce") == {"all-gather": sliced, "all-reduce": 2 * (sliced + whole)}


@pytest.mark.slow
def test_a_model_of_ones_own(fsdp):
    model = jax.eval_shape(own_gpt.GPT.init, jax.random.key(0))
    args = tr.abstract(model, "params"), tr.abstract(inputs(), "compute")
    assert of_parameters(tr.ledger(jax.grad(own_gpt.loss), *args), "reduce-scatter") == once(model)


@pytest.mark.slow
def test_each_use_on_its_own_scatters_on_its_own(fsdp):
    """What the test above would not see, were the ledger to count both as one."""
    model = jax.eval_shape(own_gpt.GPT.init, jax.random.key(0))
    args = tr.abstract(model, "params"), tr.abstract(inputs(), "compute")

    def apart(model, data):
        sums = tr.nn.next_token_loss(
            model(data["tokens"], data["documents"]), model.embedding.table, data["targets"], data["weights"]
        )
        return sums.total / sums.tokens

    found = of_parameters(tr.ledger(jax.grad(apart), *args), "reduce-scatter")
    assert found["reduce-scatter"] == parts(model)[0] + parts(model.embedding)[0]
