# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Named tensors
#
# The dimensions of an array have names, and operations work by name. A model written this way says nothing about
# devices. A layout, a small map from names to mesh axes, makes it data parallel, FSDP or tensor parallel afterwards.
#
# Eight CPU devices stand in for a mesh. They have to be requested before JAX looks at the machine.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import trellis as tr

# %% [markdown]
# ## Operations by name
#
# A sum says which names to remove. Arithmetic broadcasts if one operand's names contain the other's, in any order.

# %%
x = tr.random.normal(jax.random.key(0), {"batch": 8, "height": 16, "width": 16})
mean = x.mean("height")
for array in (x, mean, x - mean, x.sum(("height", "width"))):
    print(tr.typeof(array))

# %% [markdown]
# A contraction says which name it sums over, and `vmap` which name it maps over. The function inside sees one example.

# %%
w = tr.random.normal(jax.random.key(1), {"width": 16, "out": 4})
print(tr.typeof(tr.dot(x, w, over="width")))
print(tr.typeof(tr.vmap(lambda image: image.sum("height"), "batch")(x)))

# %% [markdown]
# If names do not fit, the error says which rule was broken, what was seen and how to fix it.

# %%
try:
    x + tr.random.normal(jax.random.key(2), {"height": 15})
except Exception as error:
    print(type(error).__name__, "\n", error)

# %% [markdown]
# ## A layer
#
# Weights have names too. The code mentions no mesh, and needs none to run.


# %%
class Mlp(eqx.Module):
    up: tr.NamedArray
    down: tr.NamedArray

    @staticmethod
    def init(key, embed=32, mlp=64):
        up, down = jax.random.split(key)
        return Mlp(
            tr.random.normal(up, {"embed": embed, "mlp": mlp}, at="params") * embed**-0.5,
            tr.random.normal(down, {"mlp": mlp, "embed": embed}, at="params") * mlp**-0.5,
        )

    def __call__(self, x):
        return x + tr.dot(tr.gelu(tr.dot(x, self.up, over="embed")), self.down, over="mlp")


def model(key):
    """Four layers, stacked under the name `layers`, so that one is compiled and not four."""
    return tr.Stacked.init(Mlp.init, tr.Axis("layers", 4), key=key)


def loss(layers, x):
    out = layers.fold(x)
    return (out * out).mean().array


x = tr.random.normal(jax.random.key(1), {"batch": 16, "pos": 8, "embed": 32})
alone = float(jax.jit(loss)(model(jax.random.key(0)), x))
print(alone)

# %% [markdown]
# ## Layouts
#
# `params` says where parameters rest, `compute` where arrays are while they are in use. A parameter that rests in
# slices over `data`, and is used with batches in slices over `data`, is gathered before use: that is FSDP. One line per
# layout changes what moves; the loss stays the same.

# %%
LAYOUTS = {
    "data parallel": ({"data": 8}, {}, {"batch": "data"}),
    "FSDP": ({"data": 8}, {"embed": "data"}, {"batch": "data"}),
    "FSDP and tensor parallel": (
        {"data": 4, "model": 2},
        {"embed": "data", "mlp": "model"},
        {"batch": "data", "mlp": "model"},
    ),
    "and sequence parallel": (
        {"data": 4, "model": 2},
        {"embed": "data", "mlp": "model"},
        {"batch": "data", "mlp": "model", "pos": "model"},
    ),
}

for name, (sizes, params, compute) in LAYOUTS.items():
    with tr.Layout(tr.make_mesh(**sizes), params=params, compute=compute):
        layers, batch = tr.named_jit(model)(jax.random.key(0)), tr.shard(x, "compute")
        value, _ = tr.named_jit(jax.value_and_grad(loss))(layers, batch)
        assert abs(float(value) - alone) < 1e-5
        print(f"{name}: loss {float(value):.7f}; `up` rests as {tr.typeof(layers.block.up)}")
        print(tr.ledger(jax.value_and_grad(loss), layers, batch), "\n")

# %% [markdown]
# The ledger is made from the types, without compiling. Each row is a collective, with its mesh axes, its array, its
# pass and its line of this page. Note that each gather has a reduce-scatter in the backward pass, and that sequence
# parallelism turns an all-reduce over `model` into a reduce-scatter and an all-gather.
#
# ## Random numbers
#
# A key gives the same numbers on every mesh. Each number is made on the device that keeps it.

# %%
draw = lambda: tr.random.normal(jax.random.key(2), {"embed": 4096, "mlp": 64})
with tr.Layout(tr.make_mesh(data=8), compute={"embed": "data"}):
    spread = tr.named_jit(draw)()
print(tr.typeof(spread), bool(jnp.array_equal(draw().array, jax.device_get(spread.array))))
