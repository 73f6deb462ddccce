"""From one device to a mesh, by hand: what a notebook on sharded transformers does, in current JAX and in the notation.

    python examples/by_hand.py

1. data parallel: an array in slices, or all of it on one device first, and what that costs in memory
2. gradients and memory
3. a product split over two mesh axes
4. a transformer block in the style of GPT-J, partitioned by hand: one sum per block
5. embedding and loss with the vocabulary in parts: a shared maximum, and z-loss
6. a training step on characters, saved and restored without pickle, on another mesh

Each part prints what each device holds.
"""

import argparse as text_to_learn
import functools
import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import trellis as tr  # noqa: E402
from trellis import Stack, f32, i32, struct  # noqa: E402
from trellis.inspect import live_bytes, memory  # noqa: E402

# ---------------------------------------------------------------------------------------------------------------------
# 1 to 3: products


def held(title: str, before: dict[int, int]) -> dict[int, int]:
    """Prints what each device holds more than before, and gives it."""
    now = {device: count - before[device] for device, count in live_bytes().items()}
    print(f"  {title + ':':44}" + " ".join(f"{count / 1024:5.0f}" for count in now.values()) + "  KiB on device 0 to 7")
    return now


def random_in(mesh, text: str, *shape: int) -> jax.Array:
    """Random numbers, each device making its own slice: the array is never whole anywhere."""
    spec = tr.parse(text).spec
    with jax.set_mesh(mesh):
        return jax.jit(lambda key: jax.random.normal(key, shape, out_sharding=spec))(jax.random.key(0))


def data_parallel() -> None:
    print("1. Data parallel: 8 batches, 8 weights, one of each on every device")
    mesh, batch, embed, hidden = tr.make_mesh(d=8), 64, 128, 256
    before = live_bytes()
    x = random_in(mesh, "devices/d batch embed", 8, batch, embed)
    w = random_in(mesh, "devices/d embed hidden", 8, embed, hidden)

    @tr.shard_map
    def product(x: f32["devices/d batch embed"], w: f32["devices/d embed hidden"]) -> f32["devices/d batch hidden"]:
        return tr.einsum("devices/d batch embed, devices/d embed hidden -> devices/d batch hidden", x, w)

    with jax.set_mesh(mesh):
        out = jax.jit(product)(x, w)
        print(f"  {tr.typeof(x)} times {tr.typeof(w)}: {len(tr.ledger(product, x, w))} collectives")
    even = held("made in slices", before)
    assert len(set(even.values())) == 1
    del w, out

    # The same weights made as one array first: all of them are on the first device, until the last slice has left it.
    one = jax.random.normal(jax.random.key(0), (embed, hidden))
    stacked = jnp.stack([one] * 8)
    uneven = held("weights stacked on one device", before)
    assert uneven[0] > 4 * uneven[1]
    spread = jax.device_put(stacked, jax.NamedSharding(mesh, tr.parse("devices/d embed hidden").spec))
    held("then spread out, the stack still there", before)
    del one, stacked, spread, x


def gradients_and_memory() -> None:
    print("2. Gradients: as large as what they are of, and the operands are kept for them")
    mesh = tr.make_mesh(d=8)
    x, w = random_in(mesh, "batch/d embed", 512, 128), random_in(mesh, "embed hidden/d", 128, 256)

    @tr.shard_map
    def mean(x: f32["batch/d embed"], w: f32["embed hidden/d"]) -> f32[""]:
        whole = tr.all_gather("embed hidden/d -> embed hidden ~d", w)
        out = tr.einsum("batch/d embed, embed hidden ~d -> batch/d hidden", x, whole)
        return tr.all_reduce("+d -> ", tr.einsum("batch/d hidden -> +d", out)) / (512 * 256)

    with jax.set_mesh(mesh):
        before = live_bytes()
        jax.block_until_ready(jax.jit(mean)(x, w))
        forward = held("after the value", before)
        gradients = jax.block_until_ready(jax.jit(jax.grad(mean, (0, 1)))(x, w))
        backward = held("after the gradients of x and w", before)
        assert backward[0] - forward[0] >= (x.nbytes + w.nbytes) // 8
        print(tr.ledger(jax.value_and_grad(mean, (0, 1)), x, w))
        assert jax.tree.map(tr.typeof, gradients) == (tr.typeof(x), tr.typeof(w))


def two_axes() -> None:
    print("3. Two axes: the batch over x, the hidden width over y; each device has a block, and nothing moves")
    mesh = tr.make_mesh(x=4, y=2)
    before = live_bytes()
    x, w = random_in(mesh, "batch/x embed", 512, 128), random_in(mesh, "embed hidden/y", 128, 256)

    @tr.shard_map
    def product(x: f32["batch/x embed"], w: f32["embed hidden/y"]) -> f32["batch/x hidden/y"]:
        return tr.einsum("batch/x embed, embed hidden/y -> batch/x hidden/y", x, w)

    with jax.set_mesh(mesh):
        out = jax.block_until_ready(jax.jit(product)(x, w))
        assert not len(tr.ledger(product, x, w))
    print(f"  {tr.typeof(out)}")
    held("operands and result", before)
    np.testing.assert_allclose(out, np.asarray(x) @ np.asarray(w), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# 4 and 5: a model over batches (`dp`) and parts of each product (`mp`)

SIZES = {"vocab": 128, "length": 32, "embed": 64, "heads": 4, "head_dim": 16, "mlp": 256, "layers": 2}
Z_LOSS = 1e-4


@struct
class Norm:
    scale: f32["embed"]
    bias: f32["embed"]


@struct
class Block:
    norm: Norm
    q: f32["embed heads/mp head_dim"]
    k: f32["embed heads/mp head_dim"]
    v: f32["embed heads/mp head_dim"]
    out: f32["heads/mp head_dim embed"]
    up: f32["embed mlp/mp"]
    up_bias: f32["mlp/mp"]
    down: f32["mlp/mp embed"]
    down_bias: f32["embed"]


@struct
class Weights:
    embedding: f32["vocab/mp embed"]
    positions: f32["length embed/mp"]
    blocks: Stack["layers", Block]
    norm: Norm
    head: f32["embed vocab/mp"]


def normalize(x, norm: Norm):
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * norm.scale[None, None] + norm.bias[None, None]


def block_of(x, block: Block):
    """Attention and feed-forward side by side on one norm: both partial results add up before one all-reduce."""
    # From here four products use it: cast once, so that its gradient is summed over `mp` once.
    y = tr.reshard("batch/dp pos embed -> batch/dp pos embed ~mp", normalize(x, block.norm))
    into = "batch/dp pos embed ~mp, embed heads/mp head_dim -> batch/dp pos heads/mp head_dim"
    q, k, v = (tr.einsum(into, y, w) for w in (block.q, block.k, block.v))
    pairs = "batch/dp pos heads/mp head_dim, batch/dp key_pos heads/mp head_dim -> batch/dp heads/mp pos key_pos"
    scores = tr.einsum(pairs, q, k) / math.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    mixed = tr.einsum(
        "batch/dp heads/mp pos key_pos, batch/dp key_pos heads/mp head_dim -> batch/dp pos heads/mp head_dim",
        jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)),
        v,
    )
    attended = tr.einsum(
        "batch/dp pos heads/mp head_dim, heads/mp head_dim embed -> batch/dp pos embed +mp", mixed, block.out
    )
    wide = tr.einsum("batch/dp pos embed ~mp, embed mlp/mp -> batch/dp pos mlp/mp", y, block.up)
    wide = jax.nn.gelu(wide + block.up_bias[None, None])
    fed = tr.einsum("batch/dp pos mlp/mp, mlp/mp embed -> batch/dp pos embed +mp", wide, block.down)
    summed = tr.all_reduce("batch/dp pos embed +mp -> batch/dp pos embed", attended + fed)
    return x + summed + block.down_bias[None, None], None


def embed(tokens, weights: Weights):
    """Tokens of other devices' parts are zeros here; the sum has them all. Positions are split over the width."""
    found = tr.take("vocab/mp embed, batch/dp pos -> batch/dp pos embed +mp", weights.embedding, tokens)
    positions = tr.all_gather("length embed/mp -> length embed", weights.positions)
    return tr.all_reduce("batch/dp pos embed +mp -> batch/dp pos embed", found) + positions[None]


def losses_of(x, head, targets):
    """Cross entropy and z-loss of each token. The logits stay in parts: a maximum and two sums a token move."""
    copied = tr.reshard("batch/dp pos embed -> batch/dp pos embed ~mp", x)
    logits = tr.einsum("batch/dp pos embed ~mp, embed vocab/mp -> batch/dp pos vocab/mp", copied, head)
    largest = jax.lax.stop_gradient(logits.max(-1))
    largest = tr.all_gather("part/mp batch/dp pos -> part batch/dp pos", largest[None]).max(0)
    sums = tr.einsum("batch/dp pos vocab/mp -> batch/dp pos +mp", jnp.exp(logits - largest[..., None]))
    normalizer = jnp.log(tr.all_reduce("batch/dp pos +mp -> batch/dp pos", sums)) + largest
    target = tr.take("batch/dp pos vocab/mp, batch/dp pos -> batch/dp pos +mp", logits, targets)
    target = tr.all_reduce("batch/dp pos +mp -> batch/dp pos", target)
    return normalizer - target + Z_LOSS * normalizer**2


@tr.shard_map
def loss_of(weights: Weights, tokens: i32["batch/dp pos"], targets: i32["batch/dp pos"]) -> f32[""]:
    x, _ = jax.lax.scan(block_of, embed(tokens, weights), weights.blocks)
    losses = losses_of(normalize(x, weights.norm), weights.head, targets)
    count = losses.size * jax.lax.axis_size("dp")
    return tr.all_reduce("+dp -> ", tr.einsum("batch/dp pos -> +dp", losses)) / count


def plain_loss(w: Weights, tokens, targets):
    """The same for one device, to compare with."""
    x = w.embedding[tokens] + w.positions[None]
    for i in range(SIZES["layers"]):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], w.blocks)
        y = normalize(x, block.norm)
        q, k, v = (jnp.einsum("bte,ehd->bthd", y, m) for m in (block.q, block.k, block.v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)
        fed = jax.nn.gelu(y @ block.up + block.up_bias) @ block.down + block.down_bias
        x = x + jnp.einsum("bthd,hde->bte", mixed, block.out) + fed
    logits = normalize(x, w.norm) @ w.head
    normalizer = jax.nn.logsumexp(logits, -1)
    target = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (normalizer - target + Z_LOSS * normalizer**2).mean()


def initial(mesh) -> Weights:
    like = tr.struct_shapes(Weights, SIZES, mesh)

    def draw(key):
        paths, tree = jax.tree.flatten_with_path(like)
        keys = jax.random.split(key, len(paths))
        leaves = []
        for one, (path, kind) in zip(keys, paths, strict=True):
            name, spec = path[-1].name, kind.sharding.spec
            if name == "scale" or "bias" in name:
                value = 1.0 if name == "scale" else 0.0
                leaves.append(jax.lax.broadcast_in_dim(jnp.float32(value), kind.shape, (), out_sharding=spec))
            else:
                leaves.append(0.05 * jax.random.normal(one, kind.shape, out_sharding=spec))
        return jax.tree.unflatten(tree, leaves)

    return jax.jit(draw)(jax.random.key(0))


# ---------------------------------------------------------------------------------------------------------------------
# 6: training on characters


def characters(mesh, step: int, rows: int = 16):
    """Rows of the standard library's own text, as the codes of its characters, and the next characters."""
    text = np.frombuffer(Path(text_to_learn.__file__).read_bytes(), np.uint8).astype(np.int32) % SIZES["vocab"]
    starts = np.random.default_rng(step).integers(0, len(text) - SIZES["length"] - 1, rows)
    windows = np.stack([text[start : start + SIZES["length"] + 1] for start in starts])
    place = jax.NamedSharding(mesh, tr.parse("batch/dp pos").spec)
    return jax.device_put(windows[:, :-1], place), jax.device_put(windows[:, 1:], place)


optimizer = optax.adam(3e-3)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(weights, state, tokens, targets):
    loss, gradients = jax.value_and_grad(loss_of)(weights, tokens, targets)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(weights, updates), state, loss


def names(tree) -> list[str]:
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(tree)]


def save(path: Path, weights: Weights) -> None:
    save_file({name: np.asarray(leaf) for name, leaf in zip(names(weights), jax.tree.leaves(weights))}, path)


def restore(path: Path, mesh) -> Weights:
    """Each leaf where the annotations say on this mesh, which may be another one than it was saved from."""
    stored, like = load_file(path), tr.struct_shapes(Weights, SIZES, mesh)
    leaves = [jax.device_put(stored[n], leaf.sharding) for n, leaf in zip(names(like), jax.tree.leaves(like))]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def a_transformer(steps: int = 40) -> list[float]:
    mesh = tr.make_mesh(dp=4, mp=2)
    with jax.set_mesh(mesh):
        before = live_bytes()
        print("4. and 5. A block with one sum, and a vocabulary in parts")
        weights = initial(mesh)
        held("weights, half of each on a device", before)
        tokens, targets = characters(mesh, 0)
        value, gradients = jax.jit(jax.value_and_grad(loss_of))(weights, tokens, targets)
        host = jax.tree.map(jnp.asarray, jax.device_get((weights, tokens, targets)))
        wanted, by_plain = jax.value_and_grad(plain_loss)(*host)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), gradients, by_plain)
        print(tr.ledger(jax.value_and_grad(loss_of), weights, tokens, targets))
        print(memory(jax.value_and_grad(loss_of), weights, tokens, targets, compile=False))
        del gradients, by_plain, host

        print("6. Training on characters")
        state, losses = optimizer.init(weights), []
        for step in range(steps):
            weights, state, loss = train_step(weights, state, *characters(mesh, step))
            losses.append(float(loss))
            if step % 10 == 0 or step == steps - 1:
                print(f"  step {step}: {losses[-1]:.3f} nats a character")
        held("weights and two moments", before)
        expected = float(jax.jit(loss_of)(weights, *characters(mesh, steps)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save(path, weights)
        other = tr.make_mesh(dp=2, mp=4)
        with jax.set_mesh(other):
            again = float(jax.jit(loss_of)(restore(path, other), *characters(other, steps)))
    print(f"  saved on dp=4 mp=2 with loss {expected:.5f}, restored on dp=2 mp=4 with {again:.5f}")
    np.testing.assert_allclose(again, expected, rtol=1e-5)
    assert losses[-1] < losses[0] - 1
    return losses


def main() -> None:
    data_parallel()
    gradients_and_memory()
    two_axes()
    a_transformer()


if __name__ == "__main__":
    main()
