# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # The explicit trainer
#
# This page writes a whole training step as one device's program: loss, gradients, clipping and AdamW, with FSDP and
# tensor partitioning written out. `examples/explicit_train.py` is a Llama in this style with data, checkpoints and
# reports. This page has its skeleton, a feed-forward model of the same shape, and shows what happens when one line is
# left out.

# %%
import inspect

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import trellis as tr
from trellis import Stack, f32, struct

mesh = tr.make_mesh(data=4, model=2)
jax.set_mesh(mesh)
LAYERS, EMBED, MLP, BATCH = 3, 32, 64, 16

# %% [markdown]
# ## What is stored, and where
#
# Weights rest in slices over both axes: `data` is FSDP, `model` is tensor partitioning. `Stack` adds a leading name to
# all arrays of a struct.


# %%
@struct
class Layer:
    up: f32["embed/data mlp/model"]
    down: f32["mlp/model embed/data"]


@struct
class State:
    layers: Stack["layers", Layer]
    mean: Stack["layers", Layer]
    square: Stack["layers", Layer]


def normal(key, text, *shape):
    return 0.1 * jax.random.normal(jax.random.key(key), shape, out_sharding=tr.parse(text).spec)


@jax.jit
def initial():
    layers = Layer(
        up=normal(0, "layers embed/data mlp/model", LAYERS, EMBED, MLP),
        down=normal(1, "layers mlp/model embed/data", LAYERS, MLP, EMBED),
    )
    zeros = jax.tree.map(jnp.zeros_like, layers)
    return State(layers=layers, mean=zeros, square=jax.tree.map(jnp.copy, zeros))


# %% [markdown]
# ## The loss
#
# A weight is gathered over `data` where it is used. `~data` in the result's type says that each device has a copy
# whose gradient is a sum over `data`. So the gradient of this gather is one reduce-scatter, which leaves the gradient
# where the weight rests. The second product sums over a sliced dimension, so its result is `+model` until the
# all-reduce.


# %%
def layer_of(x, layer):
    up = tr.all_gather("embed/data mlp/model -> embed mlp/model ~data", layer.up)
    down = tr.all_gather("mlp/model embed/data -> mlp/model embed ~data", layer.down)
    copied = tr.reshard("batch/data embed -> batch/data embed ~model", x)
    hidden = tr.einsum("batch/data embed ~model, embed mlp/model ~data -> batch/data mlp/model", copied, up)
    out = tr.einsum("batch/data mlp/model, mlp/model embed ~data -> batch/data embed +model", jax.nn.silu(hidden), down)
    return x + tr.all_reduce("batch/data embed +model -> batch/data embed", out), None


def loss_of(layers, x, y):
    out, _ = jax.lax.scan(jax.checkpoint(layer_of, prevent_cse=False), x, layers)
    errors = tr.einsum("batch/data embed -> +data", (out - y) ** 2)
    return tr.all_reduce("+data -> ", errors) / (BATCH * EMBED)


# %% [markdown]
# ## The step
#
# AdamW (Loshchilov and Hutter, 2019, [arXiv:1711.05101](https://arxiv.org/abs/1711.05101)) works on the slices that a
# device has. Only the gradient's norm needs the other slices.


# %%
@tr.shard_map
def train_step(
    state: State, x: f32["batch/data embed"], y: f32["batch/data embed"], count: f32[""]
) -> tuple[State, f32[""]]:
    loss, gradients = jax.value_and_grad(loss_of)(state.layers, x, y)
    squares = [
        tr.einsum("layers embed/data mlp/model, layers embed/data mlp/model -> +data +model", g, g)
        for g in (gradients.up, jnp.swapaxes(gradients.down, 1, 2))
    ]
    norm = jnp.sqrt(tr.all_reduce("+data +model -> ", squares[0] + squares[1]))
    clip = 1 / jnp.maximum(norm, 1.0)

    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * clip * g, state.mean, gradients)
    square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * (clip * g) ** 2, state.square, gradients)

    def update(w, m, s):
        return w - 1e-2 * (m / (1 - 0.9**count) / (jnp.sqrt(s / (1 - 0.95**count)) + 1e-8) + 0.1 * w)

    return State(jax.tree.map(update, state.layers, mean, square), mean, square), loss


rows = jax.NamedSharding(mesh, tr.parse("batch/data embed").spec)
rng = np.random.default_rng(0)
x = jax.device_put(rng.normal(size=(BATCH, EMBED)).astype(np.float32), rows)
y = jax.device_put(np.roll(np.asarray(x), 1, 1), rows)
state = initial()
print(tr.ledger(train_step, state, x, y, jnp.float32(1)))

# %% [markdown]
# Each layer gathers its two weights in the forward pass, and again in the backward pass, since `jax.checkpoint` keeps
# neither of them. The gradients cost only two reduce-scatters a layer.

# %%
step = jax.jit(train_step, donate_argnums=0)
losses = []
for count in range(1, 61):
    state, loss = step(state, x, y, jnp.float32(count))
    losses.append(float(loss))
print(losses[0], losses[-1])
assert losses[-1] < 0.5 * losses[0]

# %% [markdown]
# ## One line less
#
# Without the copy's mark the gradient would be wrong, and without a sum the loss. Neither program gets as far as a
# number. The next cell leaves out each collective of the layer in turn, by rewriting its text.

# %%
source = inspect.getsource(layer_of)
first = jax.tree.map(lambda w: w[0], state.layers)


def without(collective):
    """The layer as a program of its own, with the operand in place of a collective."""
    names = dict(globals())
    exec(source.replace(collective, collective.rsplit(", ", 1)[1].rstrip(")")), names)

    @tr.shard_map
    def one_layer(layer: Layer, x: f32["batch/data embed"]) -> f32["batch/data embed"]:
        return names["layer_of"](x, layer)[0]

    return one_layer


for collective in (
    'tr.all_gather("embed/data mlp/model -> embed mlp/model ~data", layer.up)',
    'tr.reshard("batch/data embed -> batch/data embed ~model", x)',
    'tr.all_reduce("batch/data embed +model -> batch/data embed", out)',
):
    try:
        jax.eval_shape(without(collective), first, x)
    except Exception as error:
        print(f"without {collective}:\n  {type(error).__name__}: {error}\n")
    else:
        raise AssertionError(f"went through without {collective}")
