# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # The three modes
#
# JAX has three ways to program a mesh, and the notation serves all of them. In *explicit* mode types carry shardings,
# and Trellis moves arrays as a layout says. In *auto* mode the compiler chooses. In *manual* mode (`shard_map`) you
# write the program of one device, and each collective is a line of it. This page computes one product in each mode.

# %%
import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import trellis as tr
from trellis import f32
from trellis.inspect import collectives

BATCH, WIDE, OUT = 8, 64, 256
a = np.arange(BATCH * WIDE, dtype=np.float32).reshape(BATCH, WIDE) / WIDE
b = np.ones((WIDE, OUT), np.float32)
expected = np.square(a) @ b

# %% [markdown]
# ## Explicit
#
# The summed dimension is sliced over `y`, so each device has a part of the sum; the result is wanted whole along `y`.
# The ledger shows that this costs one all-reduce, and why.


# %%
def product(x, w):
    return tr.einsum("batch wide, wide out -> batch out", tr.square(x), w)


layout = tr.Layout(tr.make_mesh(x=2, y=4), compute={"batch": "x", "wide": "y"})
with layout:
    x, w = tr.shard((tr.named(a, "batch wide"), tr.named(b, "wide out")), "compute")
    print(tr.typeof(x), "times", tr.typeof(w))
    out = tr.named_jit(product)(x, w)
    print("gives", tr.typeof(out))
    print(tr.ledger(product, x, w))
np.testing.assert_allclose(out.array, expected, rtol=1e-5)

# %% [markdown]
# ## Auto
#
# This is the same code on a mesh whose axes the compiler controls. Types say nothing about slices there, so the
# compiled program shows what the compiler chose.

# %%
auto = tr.Layout(tr.make_mesh(x=2, y=4, axis_type="auto"), compute={"batch": "x", "wide": "y"})
with auto:
    x, w = tr.shard((tr.named(a, "batch wide"), tr.named(b, "wide out")), "compute")
    compiled = tr.named_jit(product).lower(x, w).compile()
    out = tr.named_jit(product)(x, w)
    print(collectives(compiled, auto.mesh))
np.testing.assert_allclose(out.array, expected, rtol=1e-5)

# %% [markdown]
# ## Manual
#
# This is one device's view. The partial sum is in the type, as `+y`, until a collective settles it.

# %%
mesh = tr.make_mesh(x=2, y=4)


@tr.shard_map
def by_hand(x: f32["batch/x wide/y"], w: f32["wide/y out"]) -> f32["batch/x out"]:
    partial = tr.einsum("batch/x wide/y, wide/y out -> batch/x out +y", x * x, w)
    return tr.all_reduce("batch/x out +y -> batch/x out", partial)


def put(array, text):
    return jax.device_put(array, jax.NamedSharding(mesh, tr.parse(text).spec))


x, w = put(a, "batch/x wide/y"), put(b, "wide/y out")
with jax.set_mesh(mesh):
    print(tr.ledger(by_hand, x, w))
    np.testing.assert_allclose(jax.jit(by_hand)(x, w), expected, rtol=1e-5)

# %% [markdown]
# Without that line the program would run and give a wrong result. Here it does not run: the exponential of a part of a
# sum is not a part of anything.


# %%
@tr.shard_map
def forgotten(x: f32["batch/x wide/y"], w: f32["wide/y out"]) -> f32["batch/x out"]:
    return jnp.exp(tr.einsum("batch/x wide/y, wide/y out -> batch/x out +y", x * x, w))


with jax.set_mesh(mesh):
    try:
        jax.eval_shape(forgotten, x, w)
    except tr.PendingSumError as error:
        print(error)

# %% [markdown]
# Some things are easy on a slice and awkward on a whole array, and others the other way around. By hand, the mean over
# devices of the first four elements of each slice takes three lines.


# %%
@tr.shard_map
def average(a: f32["n/x/y"]) -> f32["4"]:
    return jax.lax.pmean(a[:4], ("x", "y"))


counted = put(np.arange(512, dtype=np.float32), "n/x/y")
with jax.set_mesh(mesh):
    print(jax.jit(average)(counted))
np.testing.assert_allclose(jax.device_get(counted).reshape(8, 64)[:, :4].mean(0), [224, 225, 226, 227])
