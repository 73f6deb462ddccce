"""The explicit trainer: a Llama, its loss, AdamW, FSDP and tensor partitioning, every collective in the text.

    python examples/explicit_train.py                                # seconds, on this machine, eight CPU devices
    python examples/explicit_train.py --preset starter --steps 600   # 5M parameters on the embedded corpus
    python examples/explicit_train.py --preset 1b --devices 0 --data 8 --model 1 --store TOKENS --dtype bfloat16

The same command again goes on where the last checkpoint ends. `--profile` records two steps, `--graph` draws the
optimized program. A token store may be Trellis's own or seqax's flat-tokens.

The program is one device's view (`shard_map`). A type like `f32["embed/data mlp/model"]` says the whole array's
dimensions and the mesh axes that slice them. `+model` is a sum that devices along `model` hold parts of, `~data` a copy
whose gradient is such a sum. Weights, gradients and optimizer state rest in slices over `data` (FSDP) and `model`
(tensor partitioning); activations are sliced over sequences (`batch/data`) and, between products, over positions
(`pos/model`). Forgetting a reduction is an error while tracing.
"""

import argparse
import dataclasses
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import trellis as tr
from trellis import Stack, f32, i32, struct

# ---------------------------------------------------------------------------------------------------------------------
# Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A Llama with `kv_heads` groups of `queries` query heads."""

    vocab: int
    embed: int
    layers: int
    kv_heads: int
    queries: int = 1
    head_dim: int = 128
    mlp: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def sizes(self) -> dict[str, int]:
        names = ("vocab", "embed", "layers", "kv_heads", "queries", "head_dim", "mlp")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    steps: int
    learning_rate: float
    warmup: int
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    dtype: str = "float32"


# Model, sequences in a batch, positions, learning rate. The last five are the shapes that seqax publishes.
PRESETS = {
    "tiny": (Model(vocab=512, embed=64, layers=2, kv_heads=2, queries=2, head_dim=16, mlp=128), 8, 64, 1e-2),
    "starter": (Model(vocab=4096, embed=256, layers=5, kv_heads=4, queries=2, head_dim=32, mlp=768), 16, 256, 3e-3),
    "84m": (Model(vocab=32768, embed=512, layers=8, kv_heads=8, mlp=4096), 64, 1024, 3e-3),
    "270m": (Model(vocab=32768, embed=1024, layers=8, kv_heads=16, mlp=8192), 64, 1024, 3e-4),
    "540m": (Model(vocab=32768, embed=2048, layers=8, kv_heads=16, mlp=8192), 64, 1024, 3e-4),
    "1b": (Model(vocab=32768, embed=2048, layers=8, kv_heads=16, mlp=16384), 64, 1024, 1e-5),
    "2b": (Model(vocab=32768, embed=4096, layers=8, kv_heads=16, mlp=16384), 64, 1024, 1e-5),
}

# ---------------------------------------------------------------------------------------------------------------------
# What is stored, and where


@struct
class Layer:
    attention_norm: f32["embed/data"]
    q: f32["embed/data kv_heads/model queries head_dim"]
    k: f32["embed/data kv_heads/model head_dim"]
    v: f32["embed/data kv_heads/model head_dim"]
    out: f32["kv_heads/model queries head_dim embed/data"]
    mlp_norm: f32["embed/data"]
    gate: f32["embed/data mlp/model"]
    up: f32["embed/data mlp/model"]
    down: f32["mlp/model embed/data"]


@struct
class Weights:
    embedding: f32["vocab/model embed/data"]
    layers: Stack["layers", Layer]
    norm: f32["embed/data"]
    head: f32["vocab/model embed/data"]


@struct
class State:
    step: i32[""]
    weights: Weights
    mean: Weights
    square: Weights


@struct
class Batch:
    tokens: i32["batch/data pos"]
    targets: i32["batch/data pos"]
    loss_mask: f32["batch/data pos"]
    segment_ids: i32["batch/data pos"]
    positions: i32["batch/data pos"]


def initial(model: Model, seed: int, mesh) -> State:
    """The first state; each device draws its own slices and no array is whole anywhere."""
    like = tr.struct_shapes(Weights, model.sizes(), mesh)
    shrunk = (2 * model.layers) ** -0.5  # what adds to the stream starts smaller in deeper models
    fan_in = {
        "embedding": 1.0,
        "q": model.embed**-0.5,
        "k": model.embed**-0.5,
        "v": model.embed**-0.5,
        "out": shrunk * (model.kv_heads * model.queries * model.head_dim) ** -0.5,
        "gate": model.embed**-0.5,
        "up": model.embed**-0.5,
        "down": shrunk * model.mlp**-0.5,
        "head": model.embed**-0.5,
    }

    def draw(key):
        paths, tree = jax.tree.flatten_with_path(like)
        leaves = []
        for number, (path, kind) in enumerate(paths):
            name, spec = path[-1].name, kind.sharding.spec
            if name not in fan_in:
                leaves.append(jax.lax.broadcast_in_dim(jnp.float32(1), kind.shape, (), out_sharding=spec))
                continue
            drawn = jax.random.normal(jax.random.fold_in(key, number), kind.shape, out_sharding=spec)
            leaves.append(drawn * fan_in[name])
        weights = jax.tree.unflatten(tree, leaves)
        zeros = jax.tree.map(jnp.zeros_like, weights)
        return State(step=jnp.int32(0), weights=weights, mean=zeros, square=jax.tree.map(jnp.copy, zeros))

    return jax.jit(draw)(jax.random.key(seed))


# ---------------------------------------------------------------------------------------------------------------------
# The model, on one device's slices


def normalize(x, scale, eps: float):
    """`batch/data pos/model embed` to the same, normalized; positions come back whole, to be used in products."""
    # Each device has other positions, so the gradient of the scale is a sum over both axes.
    scale = tr.reshard("embed/data -> embed ~data ~model", scale.astype(x.dtype))
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    x = tr.einsum(
        "batch/data pos/model embed, embed ~data ~model -> batch/data pos/model embed", wide.astype(x.dtype), scale
    )
    return tr.all_gather("batch/data pos/model embed -> batch/data pos embed ~model", x)


def rotate(x, angles):
    """Turns each pair `(i, i + head_dim / 2)` by its position's angle; `x` is `batch pos ... head_dim`."""
    angles = angles.reshape(*angles.shape[:2], *[1] * (x.ndim - 3), angles.shape[2])
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(x, layer: Layer, angles, seen, model: Model):
    """`batch/data pos embed ~model` to `batch/data pos/model embed`: each device has some of the heads."""
    wq = tr.all_gather(
        "embed/data kv_heads/model queries head_dim -> embed kv_heads/model queries head_dim ~data",
        layer.q.astype(x.dtype),
    )
    wk = tr.all_gather(
        "embed/data kv_heads/model head_dim -> embed kv_heads/model head_dim ~data", layer.k.astype(x.dtype)
    )
    wv = tr.all_gather(
        "embed/data kv_heads/model head_dim -> embed kv_heads/model head_dim ~data", layer.v.astype(x.dtype)
    )
    q = tr.einsum(
        "batch/data pos embed ~model, embed kv_heads/model queries head_dim ~data "
        "-> batch/data pos kv_heads/model queries head_dim",
        x,
        wq,
    )
    kv = "batch/data pos embed ~model, embed kv_heads/model head_dim ~data -> batch/data pos kv_heads/model head_dim"
    k, v = tr.einsum(kv, x, wk), tr.einsum(kv, x, wv)
    q, k, v = tr.save(rotate(q, angles), "query"), tr.save(rotate(k, angles), "key"), tr.save(v, "value")
    scores = tr.einsum(
        "batch/data pos kv_heads/model queries head_dim, batch/data key_pos kv_heads/model head_dim "
        "-> batch/data kv_heads/model queries pos key_pos",
        q,
        k,
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(seen[:, None, None], scores * model.head_dim**-0.5, -jnp.inf)
    mixed = tr.einsum(
        "batch/data kv_heads/model queries pos key_pos, batch/data key_pos kv_heads/model head_dim "
        "-> batch/data pos kv_heads/model queries head_dim",
        jax.nn.softmax(scores, -1).astype(x.dtype),
        v,
    )
    mixed = tr.save(mixed, "attention")
    wo = tr.all_gather(
        "kv_heads/model queries head_dim embed/data -> kv_heads/model queries head_dim embed ~data",
        layer.out.astype(x.dtype),
    )
    out = tr.einsum(
        "batch/data pos kv_heads/model queries head_dim, kv_heads/model queries head_dim embed ~data "
        "-> batch/data pos embed +model",
        mixed,
        wo,
    )
    return tr.reduce_scatter("batch/data pos embed +model -> batch/data pos/model embed", out)


def feed_forward(x, layer: Layer):
    """`batch/data pos embed ~model` to `batch/data pos/model embed`: each device has some of `mlp`."""
    gate = tr.all_gather("embed/data mlp/model -> embed mlp/model ~data", layer.gate.astype(x.dtype))
    up = tr.all_gather("embed/data mlp/model -> embed mlp/model ~data", layer.up.astype(x.dtype))
    down = tr.all_gather("mlp/model embed/data -> mlp/model embed ~data", layer.down.astype(x.dtype))
    into = "batch/data pos embed ~model, embed mlp/model ~data -> batch/data pos mlp/model"
    gate, up = tr.save(tr.einsum(into, x, gate), "gate"), tr.save(tr.einsum(into, x, up), "up")
    out = tr.einsum(
        "batch/data pos mlp/model, mlp/model embed ~data -> batch/data pos embed +model", jax.nn.silu(gate) * up, down
    )
    return tr.reduce_scatter("batch/data pos embed +model -> batch/data pos/model embed", out)


def embed(tokens, embedding, dtype):
    """Each device looks up the tokens of its part of the vocabulary; the others' are zeros, and the sum is all."""
    table = tr.all_gather("vocab/model embed/data -> vocab/model embed ~data", embedding.astype(dtype))
    x = tr.take("vocab/model embed ~data, batch/data pos -> batch/data pos embed +model", table, tokens)
    return tr.reduce_scatter("batch/data pos embed +model -> batch/data pos/model embed", x)


def token_losses(x, head, targets):
    """Cross entropy of each token, `batch/data pos`, with the vocabulary in parts: three numbers a token move."""
    table = tr.all_gather("vocab/model embed/data -> vocab/model embed ~data", head.astype(x.dtype))
    logits = tr.einsum(
        "batch/data pos embed ~model, vocab/model embed ~data -> batch/data pos vocab/model",
        x,
        table,
        preferred_element_type=jnp.float32,
    )
    largest = jax.lax.stop_gradient(jnp.max(logits, -1))
    largest = tr.all_gather("part/model batch/data pos -> part batch/data pos", largest[None]).max(0)
    exponentials = jnp.exp(logits - largest[..., None])
    total = tr.einsum("batch/data pos vocab/model -> batch/data pos +model", exponentials)
    normalizer = jnp.log(tr.all_reduce("batch/data pos +model -> batch/data pos", total)) + largest
    target = tr.take("batch/data pos vocab/model, batch/data pos -> batch/data pos +model", logits, targets)
    return normalizer - tr.all_reduce("batch/data pos +model -> batch/data pos", target)


def loss_of(weights: Weights, batch: Batch, model: Model, dtype) -> jax.Array:
    """The mean loss over the tokens that count, of the whole batch."""
    rates = model.rope_theta ** -(jnp.arange(0, model.head_dim, 2, dtype=jnp.float32) / model.head_dim)
    angles = batch.positions.astype(jnp.float32)[..., None] * rates[None, None]
    length = batch.tokens.shape[1]
    seen = jnp.tril(jnp.ones((1, length, length), bool)) & (batch.segment_ids[:, :, None] == batch.segment_ids[:, None])

    def block(x, layer: Layer):
        x = x + attention(normalize(x, layer.attention_norm, model.norm_eps), layer, angles, seen, model)
        return x + feed_forward(normalize(x, layer.mlp_norm, model.norm_eps), layer), None

    # Kept for the backward pass: what `save` marks, and each layer's input. The rest is computed again.
    block = jax.checkpoint(block, policy=tr.Keep(names=None).policy(), prevent_cse=False)
    x, _ = jax.lax.scan(block, embed(batch.tokens, weights.embedding, dtype), weights.layers)
    losses = token_losses(normalize(x, weights.norm, model.norm_eps), weights.head, batch.targets) * batch.loss_mask
    total = tr.all_reduce("+data -> ", tr.einsum("batch/data pos -> +data", losses))
    return total / tr.all_reduce("+data -> ", tr.einsum("batch/data pos -> +data", batch.loss_mask))


@tr.shard_map
def loss_and_gradients(weights: Weights, batch: Batch, model: Model, dtype: str = "float32") -> tuple[f32[""], Weights]:
    return jax.value_and_grad(loss_of)(weights, batch, model, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101), on the slices that each device has


def square_norm(tree: Weights):
    """The sum of squares over all weights. Norms' scales are the same along `model`, the others are sliced there."""
    parts: dict[str, list] = {}
    for kind, x in zip(jax.tree.leaves(tr.struct_types(Weights)), jax.tree.leaves(tree), strict=True):
        pending = " ".join(f"+{axis}" for axis in sorted(kind.shape.mesh_axes))
        parts.setdefault(pending, []).append(tr.einsum(f"{kind.shape}, {kind.shape} -> {pending}", x, x))
    (by_data, by_both) = (sum(parts[key][1:], parts[key][0]) for key in ("+data", "+data +model"))
    return tr.all_reduce("+data -> ", by_data) + tr.all_reduce("+data +model -> ", by_both)


def learning_rate(step, training: Training):
    """Linear warmup, then a cosine to a fraction of the peak; the first step's rate is not zero."""
    done = step.astype(jnp.float32) + 1
    progress = jnp.clip((done - training.warmup) / max(training.steps - training.warmup, 1), 0, 1)
    cosine = 0.5 * (1 + jnp.cos(math.pi * progress))
    after = training.final_fraction + (1 - training.final_fraction) * cosine
    return training.learning_rate * jnp.where(done < training.warmup, done / max(training.warmup, 1), after)


def adamw(state: State, gradients: Weights, training: Training) -> tuple[State, jax.Array]:
    norm = jnp.sqrt(square_norm(gradients))
    clip = 1.0 if training.clip_norm is None else training.clip_norm / jnp.maximum(norm, training.clip_norm)
    count = state.step.astype(jnp.float32) + 1
    rate = learning_rate(state.step, training)

    def leaf(kind, w, g, mean, square):
        g = g * clip
        mean = training.beta1 * mean + (1 - training.beta1) * g
        square = training.beta2 * square + (1 - training.beta2) * g * g
        scaled = jnp.sqrt(square / (1 - training.beta2**count)) + training.epsilon
        direction = mean / (1 - training.beta1**count) / scaled
        if sum(name != "layers" for name in kind.shape.names) > 1:  # matrices decay, scales do not
            direction = direction + training.weight_decay * w
        return w - rate * direction, mean, square

    new = jax.tree.map(leaf, tr.struct_types(Weights), state.weights, gradients, state.mean, state.square)
    weights, mean, square = jax.tree.transpose(jax.tree.structure(gradients), jax.tree.structure((0, 0, 0)), new)
    return State(step=state.step + 1, weights=weights, mean=mean, square=square), norm


@tr.shard_map
def train_step(state: State, batch: Batch, model: Model, training: Training) -> tuple[State, dict[str, f32[""]]]:
    """One step: the whole program is one device's."""
    loss, gradients = jax.value_and_grad(loss_of)(state.weights, batch, model, training.dtype)
    rate = learning_rate(state.step, training)
    state, norm = adamw(state, gradients, training)
    return state, {"loss": loss, "grad_norm": norm, "learning_rate": rate}


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def flops_per_token(model: Model, length: int) -> float:
    """Six for each parameter that multiplies activations (the embedding is looked up), and half of attention."""
    heads = model.kv_heads * model.queries * model.head_dim
    layer = model.embed * (2 * heads + 2 * model.kv_heads * model.head_dim + 3 * model.mlp)
    return 6 * (model.layers * layer + model.vocab * model.embed) + 12 * model.layers * heads * length / 2


def batch_of(read) -> Batch:
    return Batch(**{field.name: getattr(read, field.name) for field in dataclasses.fields(Batch)})


def train(options, model: Model, training: Training, store, mesh, peak, rows: int, length: int) -> list[float]:
    """Trains from the newest checkpoint of the folder, or from the start; gives the losses."""
    from trellis.data import Batches, Loader
    from trellis.inspect import step_svg
    from trellis.train import Checkpoints, Profile, Profiler

    batches = Batches(store, sequence_length=length, batch_size=rows, seed=options.seed)
    place = jax.NamedSharding(mesh, tr.parse("batch/data pos").spec)
    step = jax.jit(train_step, static_argnums=(2, 3), donate_argnums=(0,))
    work = flops_per_token(model, length)
    profile = Profiler(options.folder / "profile", Profile(start=3, steps=2) if options.profile else None)
    losses, began = [], time.perf_counter()
    with Checkpoints(options.folder / "checkpoints") as checkpoints:
        found = checkpoints.restore(tr.struct_shapes(State, model.sizes(), mesh))
        state = initial(model, options.seed, mesh) if found is None else found.state
        if found is not None:
            print(f"goes on after step {found.step}")
        first = int(state.step)
        with Loader(batches, place, start_step=first) as loader:
            for index, read in loader:
                if index >= training.steps:
                    break
                batch = batch_of(read)
                if index == first and options.graph:
                    compiled = step.lower(state, batch, model, training).compile()
                    (options.folder / "graph.svg").write_text(step_svg(compiled.as_text()))
                profile.before(index)
                state, metrics = step(state, batch, model, training)
                profile.after(index, metrics)
                losses.append(metrics["loss"])
                if (index + 1) % options.every == 0 or index + 1 == training.steps:
                    jax.block_until_ready(state)
                    seconds = (time.perf_counter() - began) / options.every
                    used = rows * length * work / seconds / peak if peak and index - first >= options.every else None
                    print(
                        f"step {index + 1}  loss {float(metrics['loss']):.4f}  grad norm "
                        f"{float(metrics['grad_norm']):.3f}  {rows * length / seconds:,.0f} tokens/s"
                        + (f"  MFU {100 * used:.1f} %" if used else ""),
                        flush=True,
                    )
                    began = time.perf_counter()
                if (index + 1) % options.save_every == 0 or index + 1 == training.steps:
                    checkpoints.save(index + 1, state)
    profile.close()
    return [float(loss) for loss in losses]


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="the model and the batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--devices", type=int, default=8, help="CPU devices to make; 0 uses what is here")
    parser.add_argument("--data", type=int, default=4, help="size of the FSDP mesh axis")
    parser.add_argument("--model", type=int, default=2, help="size of the tensor mesh axis")
    parser.add_argument("--store", help="a folder of tokens; the embedded corpus if not given")
    parser.add_argument("--dtype", default="float32", help="of activations and of weights in use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=5, help="steps between printed lines")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("runs/explicit"))
    parser.add_argument("--profile", action="store_true", help="record two steps for Perfetto")
    parser.add_argument("--graph", action="store_true", help="draw the optimized program as SVG")
    options = parser.parse_args(arguments)
    if options.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    from trellis.data import check_vocabulary, embedded_stores, open_store
    from trellis.train import known_peak

    model, rows, length, rate = PRESETS[options.preset]
    options.folder.mkdir(parents=True, exist_ok=True)
    stored = open_store(options.store) if options.store else embedded_stores(vocab_size=model.vocab)["train"]
    check_vocabulary(stored, model.vocab)
    training = Training(
        steps=options.steps, learning_rate=rate, warmup=max(1, options.steps // 10), dtype=options.dtype
    )
    mesh = tr.make_mesh(data=options.data, model=options.model)
    peak = known_peak(list(mesh.devices.flat), training.dtype)  # measured where these are CPUs
    with jax.set_mesh(mesh):
        return train(options, model, training, stored, mesh, peak, rows, length)


if __name__ == "__main__":
    main()
