"""The worked problems of the JAX chapter of "How To Scale Your Model", each with the communication that it causes.

    python examples/problems.py

1. The mean of each shard, in both schools, and the proof that nothing moves; the roll of each shard minus itself.
2. Experts in all their passes: on one device, left to the compiler, gathered, exchanged, and several for each token.
3. Matrix products that overlap their communication: gather, reduce, scatter, and a whole feed-forward block.
4. The same with rings that run both ways.
"""

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import trellis as tr  # noqa: E402
from trellis import f32, i32  # noqa: E402
from trellis.collectives import Ring, feed_forward, gather_matmul, matmul_reduce, matmul_scatter  # noqa: E402
from trellis.inspect import collectives, compiled_memory  # noqa: E402
from trellis.nn.moe import exchange_experts, gather_experts, grouped_matmul, local_experts  # noqa: E402

TOKENS, EMBED, MLP, EXPERTS = 64, 32, 64, 8


def put(mesh, text: str, shape: tuple[int, ...]) -> jax.Array:
    """An array that counts its elements, sliced as the text says."""
    numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 17 / 17
    return jax.device_put(numbers, jax.NamedSharding(mesh, tr.parse(text).spec))


def shard_means(mesh) -> None:
    """Problem 1, first part: `[X, D]`, the mean over each device row's tokens."""
    a = put(mesh, "tokens/x embed/y", (TOKENS, EMBED))
    layout = tr.Layout(mesh, compute={"shard": "x", "tokens": "x", "embed": "y"})

    def of_the_whole_array(a: tr.NamedArray) -> tr.NamedArray:
        sizes = {"shard": mesh.shape["x"], "row": TOKENS // mesh.shape["x"]}
        return tr.rearrange(a, "(shard row) embed -> shard row embed", **sizes).mean("row")

    @tr.shard_map
    def of_a_slice(a: f32["tokens/x embed/y"]) -> f32["shard/x embed/y"]:
        return a.mean(0, keepdims=True)

    expected = np.asarray(a).reshape(mesh.shape["x"], -1, EMBED).mean(1)
    with layout:
        for school, fn, given in (
            ("jit", tr.named_jit(of_the_whole_array), tr.named(a, "tokens embed")),
            ("shard_map", jax.jit(of_a_slice), a),
        ):
            out = fn(given)
            np.testing.assert_allclose(getattr(out, "array", out), expected, rtol=1e-6)
            inner = of_the_whole_array if school == "jit" else of_a_slice
            rows, moved = tr.ledger(inner, given), collectives(fn.lower(given).compile(), mesh)
            print(f"mean of each shard with {school}: {len(rows)} collectives by its types, {len(moved)} compiled")
            assert not len(rows) and not len(moved)


def shard_rolls(mesh, shift: int = 3) -> None:
    """Problem 1, second part: `roll(x, shift) - x` within each shard. Slices are all that the function sees."""

    @tr.shard_map
    def roll_minus_self(a: f32["tokens/x embed/y"]) -> f32["tokens/x embed/y"]:
        return jnp.roll(a, shift, axis=0) - a

    a = put(mesh, "tokens/x embed/y", (TOKENS, EMBED))
    shards = np.asarray(a).reshape(mesh.shape["x"], -1, EMBED)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(
            jax.jit(roll_minus_self)(a), (np.roll(shards, shift, 1) - shards).reshape(TOKENS, EMBED)
        )
        rows = tr.ledger(roll_minus_self, a)
        assert not len(rows)
    print(f"roll minus self within each shard: {len(rows)} collectives")


def experts_on_one_device(a, w, chosen, weights) -> jax.Array:
    """`out[i] = sum_k weights[i, k] * a[i] @ w[chosen[i, k]]`: tokens sorted by expert, and one product a group."""
    compute = lambda rows, sizes, weights: grouped_matmul(rows, w, sizes) * weights[:, None]
    return local_experts(a, chosen, weights, compute, count=EXPERTS)


def experts(mesh, choices: int) -> None:
    """Problem 2: a token's experts are numbers; weights are sliced over experts and width, tokens over both axes."""
    a, w = put(mesh, "tokens/x in/y", (TOKENS, EMBED)), put(mesh, "experts/x in out/y", (EXPERTS, EMBED, MLP))
    ids = np.stack([(5 * np.arange(TOKENS) + 3 * k) % EXPERTS for k in range(choices)], 1).astype(np.int32)
    ids = np.where(np.arange(TOKENS)[:, None] < TOKENS // 2, ids, ids[:1])  # half of the tokens want the same
    by_token = jax.NamedSharding(mesh, tr.parse("tokens/x choices").spec)
    chosen, weights = (jax.device_put(x, by_token) for x in (ids, np.full(ids.shape, 1 / choices, np.float32)))
    per_device = EXPERTS // mesh.shape["x"]
    expected = np.mean([np.einsum("td,tdf->tf", a, np.asarray(w)[ids[:, k]]) for k in range(choices)], 0)

    # One device. Weights are not taken apart for each token: that would be [tokens, in, out].
    here = [jax.device_put(np.asarray(x), jax.devices()[0]) for x in (a, w, chosen, weights)]
    one = jax.jit(experts_on_one_device).lower(*here).compile()
    np.testing.assert_allclose(one(*here), expected, rtol=1e-4)
    assert compiled_memory(one).temporaries < 4 * TOKENS * EMBED * MLP
    print(f"\nexperts, {choices} for each token, on one device\n{compiled_memory(one)}")

    # The same, left to the compiler.
    auto = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    moved = [jax.device_put(np.asarray(x), jax.NamedSharding(auto, x.sharding.spec)) for x in (a, w, chosen, weights)]
    out = jax.NamedSharding(auto, tr.parse("tokens/x out/y").spec)
    compiled = jax.jit(experts_on_one_device, out_shardings=out).lower(*moved).compile()
    np.testing.assert_allclose(compiled(*moved), expected, rtol=1e-4)
    print(f"\nleft to the compiler\n{collectives(compiled, auto)}")

    @tr.shard_map
    def gathered(
        a: f32["tokens/x in/y"],
        w: f32["experts/x in out/y"],
        chosen: i32["tokens/x choices"],
        weights: f32["tokens/x choices"],
    ) -> f32["tokens/x out/y"]:
        """The first pass by hand: every row of devices gets all tokens, and computes its own experts."""
        a = tr.all_gather("tokens/x in/y -> tokens/x in", a)
        compute = lambda rows, sizes, weights: grouped_matmul(rows, w, sizes) * weights[:, None]
        return gather_experts(a, chosen, weights, compute, axes=("x",), count=per_device)

    @tr.shard_map
    def exchanged(
        a: f32["tokens/x in/y"],
        w: f32["experts/x in out/y"],
        chosen: i32["tokens/x choices"],
        weights: f32["tokens/x choices"],
    ) -> f32["tokens/x out/y"]:
        """The second: a token travels to the devices of its experts, in rounds of a bounded buffer, and no further."""
        a = tr.all_gather("tokens/x in/y -> tokens/x in", a)
        compute = lambda rows, sizes, weights: grouped_matmul(rows, w, sizes) * weights[:, None]
        return exchange_experts(a, chosen, weights, compute, axes=("x",), count=per_device, ragged=False, slack=1.0)

    with jax.set_mesh(mesh):
        for fn in (gathered, exchanged):
            given = (a, w, chosen, weights)
            np.testing.assert_allclose(jax.jit(fn)(*given), expected, rtol=1e-4)
            print(f"\n{fn.__name__}\n{tr.ledger(fn, *given)}")


def overlapped_products(mesh, ring: Ring) -> None:
    """Problems 3 and 4: each product against the plain one, and what travels."""

    @tr.shard_map
    def gather(a: f32["batch/x in/y"], w: f32["in out/y"]) -> f32["batch/x out/y"]:
        return gather_matmul("batch/x in/y, in out/y -> batch/x out/y", a, w, ring=ring)

    @tr.shard_map
    def reduce(a: f32["batch/x in/y"], w: f32["in/y out"]) -> f32["batch/x out"]:
        return matmul_reduce("batch/x in/y, in/y out -> batch/x out", a, w, ring=ring)

    @tr.shard_map
    def scatter(a: f32["batch/x in/y"], w: f32["in/y out"]) -> f32["batch/x out/y"]:
        return matmul_scatter("batch/x in/y, in/y out -> batch/x out/y", a, w, ring=ring)

    @tr.shard_map
    def block(a: f32["batch/x in/y"], into: f32["in mlp/y"], out: f32["mlp/y in"]) -> f32["batch/x in/y"]:
        return feed_forward("batch/x in/y, in mlp/y, mlp/y in", a, [into], out, lambda h: h, ring=ring)

    a = put(mesh, "batch/x in/y", (TOKENS, EMBED))
    columns, rows = put(mesh, "in out/y", (EMBED, MLP)), put(mesh, "in/y out", (EMBED, MLP))
    down = put(mesh, "mlp/y in", (MLP, EMBED))
    plain = np.asarray(a) @ np.asarray(columns)
    name = "both ways" if ring.both_ways else "one way"
    with jax.set_mesh(mesh):
        for fn, arguments, expected in (
            (gather, (a, columns), plain),
            (reduce, (a, rows), plain),
            (scatter, (a, rows), plain),
            (block, (a, columns, down), plain @ np.asarray(down)),
        ):
            np.testing.assert_allclose(jax.jit(fn)(*arguments), expected, rtol=1e-4)
            print(f"\n{fn.__name__}, {name}, {ring.chunks} chunk{'s' * (ring.chunks > 1)}")
            print(tr.ledger(fn, *arguments))


def main() -> None:
    mesh = tr.make_mesh(x=2, y=4)
    shard_means(mesh)
    shard_rolls(mesh)
    for choices in (1, 2):
        experts(mesh, choices)
    for ring in (Ring(axis="y"), Ring(axis="y", both_ways=True)):
        overlapped_products(mesh, ring)


if __name__ == "__main__":
    main()
