# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Scaling a transformer by hand
#
# This page writes a transformer block for a mesh, with each collective written out, and shows what every device holds
# at each point. The mesh has two axes: `dp` slices the batch, and `mp` slices each product (Megatron's split: Shoeybi
# et al., 2019, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053)).

# %%
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import trellis as tr
from trellis import f32, i32, struct
from trellis.inspect import live_bytes

mesh = tr.make_mesh(dp=4, mp=2)
jax.set_mesh(mesh)  # for all that follows


def random_in(text, *shape, scale=1.0, seed=0):
    """Each device makes its own slice: the array is never whole anywhere."""
    spec = tr.parse(text).spec
    return jax.jit(lambda key: scale * jax.random.normal(key, shape, out_sharding=spec))(jax.random.key(seed))


def held(title):
    print(f"{title + ':':36}", *(f"{count / 1024:5.0f}" for count in live_bytes().values()), " KiB on device 0 to 7")


# %% [markdown]
# ## What a device holds
#
# If each device makes its own slice, the cost is the same on every device. If an array is made whole first, all of it
# is on one device until the last slice has left. At the size of a real model, this decides whether the run fits at all.

# %%
held("nothing yet")
even = random_in("rows/dp/mp width", 1024, 256)
held("made in slices")
whole = jax.device_put(np.zeros((1024, 256), np.float32), jax.devices()[0])
held("and once more on one device")
del even, whole

# %% [markdown]
# ## Weights
#
# `@struct` declares a tree of arrays. An annotation gives the names, and after each name the mesh axis that slices it.
# The vocabulary is sliced as well.


# %%
@struct
class Block:
    scale: f32["embed"]
    q: f32["embed heads/mp head_dim"]
    k: f32["embed heads/mp head_dim"]
    v: f32["embed heads/mp head_dim"]
    out: f32["heads/mp head_dim embed"]
    up: f32["embed mlp/mp"]
    down: f32["mlp/mp embed"]


@struct
class Weights:
    embedding: f32["vocab/mp embed"]
    block: Block
    head: f32["embed vocab/mp"]


VOCAB, EMBED, HEADS, HEAD_DIM, MLP = 128, 64, 4, 16, 256
into, inner = "embed heads/mp head_dim", (EMBED, HEADS, HEAD_DIM)
weights = Weights(
    embedding=random_in("vocab/mp embed", VOCAB, EMBED, scale=0.05, seed=1),
    block=Block(
        scale=jnp.ones(EMBED),
        q=random_in(into, *inner, scale=0.05, seed=2),
        k=random_in(into, *inner, scale=0.05, seed=3),
        v=random_in(into, *inner, scale=0.05, seed=4),
        out=random_in("heads/mp head_dim embed", HEADS, HEAD_DIM, EMBED, scale=0.05, seed=5),
        up=random_in("embed mlp/mp", EMBED, MLP, scale=0.05, seed=6),
        down=random_in("mlp/mp embed", MLP, EMBED, scale=0.05, seed=7),
    ),
    head=random_in("embed vocab/mp", EMBED, VOCAB, scale=0.05, seed=8),
)
held("weights, half of each on a device")

# %% [markdown]
# ## A block with one sum
#
# Attention and feed-forward read the same normalized input, as in GPT-J, so both partial results add up before one
# all-reduce. `~mp` means that each device along `mp` has a copy, whose gradient is a sum over these devices. The copy
# is made once, so the sum is settled once in the backward pass, for all four products that use the copy.


# %%
def normalize(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale[None, None]


def block_of(x, block):
    y = tr.reshard("batch/dp pos embed -> batch/dp pos embed ~mp", normalize(x, block.scale))
    project = "batch/dp pos embed ~mp, embed heads/mp head_dim -> batch/dp pos heads/mp head_dim"
    q, k, v = (tr.einsum(project, y, w) for w in (block.q, block.k, block.v))
    pairs = "batch/dp pos heads/mp head_dim, batch/dp key_pos heads/mp head_dim -> batch/dp heads/mp pos key_pos"
    scores = tr.einsum(pairs, q, k) / math.sqrt(HEAD_DIM)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    mixed = tr.einsum(
        "batch/dp heads/mp pos key_pos, batch/dp key_pos heads/mp head_dim -> batch/dp pos heads/mp head_dim",
        jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)),
        v,
    )
    out = "batch/dp pos heads/mp head_dim, heads/mp head_dim embed -> batch/dp pos embed +mp"
    attended = tr.einsum(out, mixed, block.out)
    wide = jax.nn.gelu(tr.einsum("batch/dp pos embed ~mp, embed mlp/mp -> batch/dp pos mlp/mp", y, block.up))
    fed = tr.einsum("batch/dp pos mlp/mp, mlp/mp embed -> batch/dp pos embed +mp", wide, block.down)
    return x + tr.all_reduce("batch/dp pos embed +mp -> batch/dp pos embed", attended + fed)


# %% [markdown]
# ## A vocabulary in parts
#
# A device looks up the tokens of its part of the vocabulary and has zeros for the others; the sum over devices has all
# of them. The logits stay in parts too. For each token only a maximum, a sum and the target's logit move, instead of
# the vocabulary.


# %%
def embed(tokens, table):
    found = tr.take("vocab/mp embed, batch/dp pos -> batch/dp pos embed +mp", table, tokens)
    return tr.all_reduce("batch/dp pos embed +mp -> batch/dp pos embed", found)


def token_losses(x, head, targets):
    copied = tr.reshard("batch/dp pos embed -> batch/dp pos embed ~mp", x)
    logits = tr.einsum("batch/dp pos embed ~mp, embed vocab/mp -> batch/dp pos vocab/mp", copied, head)
    largest = jax.lax.stop_gradient(logits.max(-1))
    largest = tr.all_gather("part/mp batch/dp pos -> part batch/dp pos", largest[None]).max(0)
    sums = tr.einsum("batch/dp pos vocab/mp -> batch/dp pos +mp", jnp.exp(logits - largest[..., None]))
    normalizer = jnp.log(tr.all_reduce("batch/dp pos +mp -> batch/dp pos", sums)) + largest
    target = tr.take("batch/dp pos vocab/mp, batch/dp pos -> batch/dp pos +mp", logits, targets)
    return normalizer - tr.all_reduce("batch/dp pos +mp -> batch/dp pos", target)


@tr.shard_map
def loss_of(weights: Weights, tokens: i32["batch/dp pos"], targets: i32["batch/dp pos"]) -> f32[""]:
    losses = token_losses(block_of(embed(tokens, weights.embedding), weights.block), weights.head, targets)
    count = losses.size * jax.lax.axis_size("dp")
    return tr.all_reduce("+dp -> ", tr.einsum("batch/dp pos -> +dp", losses)) / count


# %% [markdown]
# The ledger lists everything that a step moves, before it runs:

# %%
rows = jax.NamedSharding(mesh, tr.parse("batch/dp pos").spec)


def batch(step):
    """Rows that count up from a random start: the next token is the last plus one."""
    starts = np.random.default_rng(step).integers(0, VOCAB, (16, 1))
    counted = ((starts + np.arange(33)) % VOCAB).astype(np.int32)
    return jax.device_put(counted[:, :-1], rows), jax.device_put(counted[:, 1:], rows)


print(tr.ledger(jax.value_and_grad(loss_of), weights, *batch(0)))

# %% [markdown]
# ## The same on one device
#
# This is the definition without a mesh, for comparison.


# %%
def plain_loss(w, tokens, targets):
    x, b = w.embedding[tokens], w.block
    y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * b.scale
    q, k, v = (jnp.einsum("bte,ehd->bthd", y, m) for m in (b.q, b.k, b.v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(HEAD_DIM)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)
    x = x + jnp.einsum("bthd,hde->bte", mixed, b.out) + jax.nn.gelu(y @ b.up) @ b.down
    logits = x @ w.head
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]).mean()


value, gradients = jax.jit(jax.value_and_grad(loss_of))(weights, *batch(0))
wanted, by_plain = jax.value_and_grad(plain_loss)(*jax.tree.map(np.asarray, (weights, *batch(0))))
furthest = jax.tree.map(lambda a, b: float(jnp.abs(np.asarray(a) - b).max()), gradients, by_plain)
print(f"loss {value:.6f} and {wanted:.6f}; gradients differ by at most {max(jax.tree.leaves(furthest)):.1e}")
assert max(jax.tree.leaves(furthest)) < 1e-5 and abs(value - wanted) < 1e-5
del gradients, by_plain

# %% [markdown]
# ## Training
#
# Optimizer states are sliced as the weights are, without any further code.

# %%
optimizer = optax.adam(3e-3)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step_of(weights, state, tokens, targets):
    loss, gradients = jax.value_and_grad(loss_of)(weights, tokens, targets)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(weights, updates), state, loss


state, losses = optimizer.init(weights), []
for step in range(41):
    weights, state, loss = step_of(weights, state, *batch(step))
    losses.append(float(loss))
    if step % 10 == 0:
        print(f"step {step}: loss {losses[-1]:.3f}")
held("weights and two moments")
assert losses[-1] < losses[0] - 1
