# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Overlapped products
#
# If an operand is sliced along the summed dimension, a product needs a collective before it. If its result is a partial
# sum, it needs one after it. If the collective is done as a whole, the devices wait for the links, and then the links
# for the devices. If it is cut into parts, each part travels while another is multiplied. This is a *collective matmul*
# (Wang et al., 2023, [doi:10.1145/3567955.3567959](https://doi.org/10.1145/3567955.3567959)).

# %%
import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import trellis as tr
from trellis import f32
from trellis.collectives import Ring, feed_forward, gather_matmul, matmul_reduce, matmul_scatter

TOKENS, EMBED, MLP = 64, 32, 64
mesh = tr.make_mesh(x=2, y=4)


def put(text, *shape):
    numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 17 / 17
    return jax.device_put(numbers, jax.NamedSharding(mesh, tr.parse(text).spec))


a = put("batch/x embed/y", TOKENS, EMBED)
w = put("embed mlp/y", EMBED, MLP)

# %% [markdown]
# ## By hand
#
# Each device has a fourth of `a`'s columns and a fourth of `w`'s columns, and needs the product of all of `a` with its
# part of `w`. It multiplies the part of `a` that it has with the matching rows of `w`, while that part is on its way to
# the next device. After four turns it has seen all parts.


# %%
@tr.shard_map
def turns(a: f32["batch/x embed/y"], w: f32["embed mlp/y"]) -> f32["batch/x mlp/y"]:
    size, mine = jax.lax.axis_size("y"), jax.lax.axis_index("y")
    width, out = a.shape[1], 0.0
    for turn in range(size):
        whose = (mine + turn) % size  # the part of `a` that is here now came from there
        rows = jax.lax.dynamic_slice_in_dim(w, whose * width, width)
        out = out + a @ rows
        if turn + 1 < size:
            a = jax.lax.ppermute(a, "y", [(j, (j - 1) % size) for j in range(size)])
    return out


with jax.set_mesh(mesh):
    plain = np.asarray(a) @ np.asarray(w)
    np.testing.assert_allclose(jax.jit(turns)(a, w), plain, rtol=1e-4)
    print(tr.ledger(turns, a, w))

# %% [markdown]
# ## From the library
#
# The library has the same as one call, in the notation. Its gradient is overlapped too. Rings can run both ways, which
# halves the time on links that do, and in chunks.


# %%
def gathered(ring):
    @tr.shard_map
    def product(a: f32["batch/x embed/y"], w: f32["embed mlp/y"]) -> f32["batch/x mlp/y"]:
        return gather_matmul("batch/x embed/y, embed mlp/y -> batch/x mlp/y", a, w, ring=ring)

    return product


with jax.set_mesh(mesh):
    for ring in (Ring(axis="y"), Ring(axis="y", both_ways=True)):
        np.testing.assert_allclose(jax.jit(gathered(ring))(a, w), plain, rtol=1e-4)
        print(tr.ledger(gathered(ring), a, w), "\n")

# %% [markdown]
# The other direction: the summed dimension is sliced, so each device has a part of the result. The sum is wanted whole
# on all devices, or in slices.

# %%
rows = put("embed/y mlp", EMBED, MLP)
ring = Ring(axis="y")


@tr.shard_map
def reduced(a: f32["batch/x embed/y"], w: f32["embed/y mlp"]) -> f32["batch/x mlp"]:
    return matmul_reduce("batch/x embed/y, embed/y mlp -> batch/x mlp", a, w, ring=ring)


@tr.shard_map
def scattered(a: f32["batch/x embed/y"], w: f32["embed/y mlp"]) -> f32["batch/x mlp/y"]:
    return matmul_scatter("batch/x embed/y, embed/y mlp -> batch/x mlp/y", a, w, ring=ring)


with jax.set_mesh(mesh):
    for product in (reduced, scattered):
        np.testing.assert_allclose(jax.jit(product)(a, rows), plain, rtol=1e-4)
        print(tr.ledger(product, a, rows), "\n")

# %% [markdown]
# A feed-forward block gathers on the way in and scatters on the way out, in one ring each.

# %%
down = put("mlp/y embed", MLP, EMBED)


@tr.shard_map
def block(a: f32["batch/x embed/y"], up: f32["embed mlp/y"], down: f32["mlp/y embed"]) -> f32["batch/x embed/y"]:
    return feed_forward("batch/x embed/y, embed mlp/y, mlp/y embed", a, [up], down, jax.nn.relu, ring=ring)


with jax.set_mesh(mesh):
    wanted = np.maximum(plain, 0) @ np.asarray(down)
    np.testing.assert_allclose(jax.jit(block)(a, w, down), wanted, rtol=1e-4)
    print(tr.ledger(block, a, w, down))
