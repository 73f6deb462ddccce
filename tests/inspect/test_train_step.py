"""The ledger of a whole train step, optimizer and all, held against the compiled program."""

import math

import jax
import pytest

from trellis.inspect import collectives, compare, ledger, memory, structure_of
from trellis.recipes.load import load_run
from trellis.train.assemble import assemble


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"mesh.data": "4", "mesh.model": "2", "layout.preset": "fsdp_tensor_sequence", "remat.policy": "full"},
        {"mesh.replica": "2", "mesh.data": "4", "layout.preset": "hybrid", "microbatches": "2"},
    ],
    ids=["fsdp, tensor and sequence", "replicas of fsdp, accumulated"],
)
def test_a_train_step(options):
    assembled = assemble(load_run("tiny", {"batch_size": "16", **options}), jax.devices())
    with assembled.layout:
        args = (assembled.abstract, assembled.abstract_batch())
        predicted, held = ledger(assembled.step, *args), memory(assembled.step, *args, compile=False)
        compiled = assembled.step.lower(*args).compile()
    found = collectives(compiled, assembled.layout.mesh)
    comparison = compare(predicted, found, scatter_as_reduce=True)
    # A thousandth: scalars over several mesh axes are summed over one axis after the other, and a gather of token ids
    # in the recomputed pass is found to be the one before.
    assert comparison.agrees(relative=1e-3), f"\n{predicted}\n{found}\n{comparison}"
    structure = structure_of(predicted, compiled, assembled.layout.mesh)
    assert structure.right, str(structure)
    kinds = held.per_kind()
    arguments = kinds["parameters"] + kinds["optimizer"] + kinds["batch"]
    unused = arguments - compiled.memory_analysis().argument_size_in_bytes  # a counter that this step does not read
    assert 0 <= unused <= 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer.kind": "muon", "mesh.replica": "2", "mesh.data": "2"},
        {"optimizer.kind": "muon", "mesh.replica": "2", "mesh.data": "2", "mesh.model": "2"},
        {"mesh.stage": "2", "mesh.context": "2", "model.layers": "2", "accumulation": "sharded"},
    ],
    ids=["matrices of as many layers as replicas", "matrices in slices of two kinds", "a layer a stage"],
)
def test_what_is_in_a_compiled_step_is_all_that_its_types_say(options):
    """Runs whose steps a reading of the compiled program took for others."""
    count = math.prod(int(size) for name, size in options.items() if name.startswith("mesh."))
    assembled = assemble(load_run("tiny", {"batch_size": "16", **options}), jax.devices()[:count])
    with assembled.layout:
        args = (assembled.abstract, assembled.abstract_batch())
        predicted, compiled = ledger(assembled.step, *args), assembled.step.lower(*args).compile()
    structure = structure_of(predicted, compiled, assembled.layout.mesh)
    assert structure.right, str(structure)
