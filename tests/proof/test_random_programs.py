"""The interpreter against XLA's own results, on random programs: those of its CPU compiler, and of libtpu."""

import warnings

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from tests.proof.random_programs import MESH, program
from trellis._compat import full_text, kept_arguments
from trellis.mesh.topology import slice_devices
from trellis.proof.interpreter import Interpreter

SEEDS, EACH = 4, 10  # tests, and programs of each


def assert_near(found, wanted, seed):
    for index, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4, err_msg=f"result {index} of seed {seed}")


def executed(run, arrays):
    """The results of XLA on one CPU device."""
    return [np.asarray(x) for x in jax.jit(run)(*arrays)]


@pytest.fixture(autouse=True)
def loose():
    """Random programs mix what they have: strict promotion is of no use here."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.slow
@pytest.mark.parametrize("block", range(SEEDS))
def test_programs_of_the_cpu_compiler(block):
    """As they were lowered, and as they were compiled."""
    for seed in range(block * EACH, (block + 1) * EACH):
        run, arrays = program(seed)
        lowered = jax.jit(run).lower(*arrays)
        compiled = lowered.compile()
        given = [arrays[i][None] for i in kept_arguments(compiled)]
        wanted = [np.asarray(x) for x in compiled(*arrays)]
        for text in map(full_text, (lowered, compiled)):
            assert_near([x[0] for x in Interpreter(text)(given)], wanted, seed)


@pytest.mark.slow
def test_programs_of_libtpu():
    device = slice_devices("v5e:2x2")[0]
    for seed in range(2000, 2000 + EACH):
        run, arrays = program(seed)
        shaped = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=SingleDeviceSharding(device)) for a in arrays]
        compiled = jax.jit(run).trace(*shaped).lower(lowering_platforms=("tpu",)).compile()
        given = [arrays[i][None] for i in kept_arguments(compiled)]
        found = Interpreter(full_text(compiled))(given)
        assert_near([x[0] for x in found], executed(run, arrays), seed)


def mapped(seed, devices):
    """A random program with collectives on eight devices, its arguments, and their parts."""
    run, arrays = program(seed, devices=True)
    mesh = jax.sharding.Mesh(np.array(devices).reshape(tuple(MESH.values())), tuple(MESH))
    spec = P(tuple(MESH))
    count = mesh.size
    random = np.random.default_rng(seed)
    parts = [a[None] + 0.3 * random.normal(size=(count, *a.shape)).astype(np.float32) for a in arrays]

    def body(*slices):
        return [out[None] for out in run(*(s[0] for s in slices))]

    function = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * len(parts), out_specs=spec, check_vma=False)
    return jax.jit(function), mesh, spec, parts


@pytest.mark.slow
@pytest.mark.parametrize("block", range(SEEDS))
def test_collectives_of_the_cpu_compiler(block):
    for seed in range(3000 + block * EACH, 3000 + (block + 1) * EACH):
        function, mesh, spec, parts = mapped(seed, jax.devices()[:8])
        given = [jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x in parts]
        lowered = function.lower(*given)
        compiled = lowered.compile()
        kept = kept_arguments(compiled)
        wanted = [np.asarray(x) for x in compiled(*given)]
        slices = [parts[i][:, None] for i in kept]
        found = Interpreter(full_text(compiled), mesh.size)(slices)
        assert_near([np.broadcast_to(x, (mesh.size, *x.shape[1:]))[:, 0] for x in found], wanted, seed)
        whole = Interpreter(full_text(lowered), mesh.size)([parts[i][None] for i in kept])
        assert_near([x[0] for x in whole], wanted, seed)
