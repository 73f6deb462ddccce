"""What comes back from a host's memory is gathered between devices, not between hosts over their network."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis.hardware.chips import target
from trellis.inspect import ledger, structure_of
from trellis.named.saving import Keep, checkpoint, save
from trellis.plan.compile import compile_lowered, compiler_devices

ON = target("v5e:2x2")
BY_HAND = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["key"],
    offload_src="device",
    offload_dst="pinned_host",
)


def layer(mark):
    def fn(x, w):
        key = mark(jnp.tanh(jnp.einsum("bpe,ed->bpd", x, w)), "key")
        key = jax.reshard(key, P("data", None, None))
        scores = jnp.einsum("bpe,bqe->bpq", x, key, out_sharding=P("data", "model", None))
        return jnp.einsum("bpq,bqe->bpe", jax.nn.softmax(scores), key, out_sharding=P("data", "model", None))

    return fn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "by_hosts"),
    [
        (checkpoint(layer(save), Keep(offload=("key",))), []),
        (
            jax.checkpoint(layer(checkpoint_name), policy=BY_HAND),
            ["all-gather of f32[2 256 128]"],
        ),
    ],
)
def test_keys_kept_by_the_host_are_gathered_by_devices(fn, by_hosts):
    """libtpu 0.0.42 and JAX 0.10.2: hosts gather what a program's text has gathered right after it came back."""
    mesh = tr.make_mesh(compiler_devices(ON), data=2, model=2)
    placed = lambda shape, *dims: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, P(*dims)))
    args = placed((4, 256, 128), "data", "model"), placed((128, 128))
    gradient = jax.jit(jax.grad(lambda x, w: fn(x, w).sum(), (0, 1)))
    with jax.set_mesh(mesh):
        lowered = gradient.trace(*args).lower(lowering_platforms=("tpu",))
        rows = ledger(gradient, *args)
    structure = structure_of(rows, compile_lowered(lowered, ON, name="keys").text, mesh)
    assert list(structure.by_hosts) == by_hosts and structure.right == (not by_hosts) and not structure.certain
    told = [fault for fault in structure.faults if fault.startswith("between hosts")]
    assert told == [f"between hosts, over their network: {what}" for what in by_hosts]
