import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trellis.errors import UserError
from trellis.inspect import flops, ledger
from trellis.mesh.meshes import make_mesh
from trellis.named import NamedArray, named
from trellis.named.blocks import Blocks
from trellis.optim import (
    Adafactor,
    AdamW,
    Constant,
    Cosine,
    Lion,
    Muon,
    all_finite,
    average,
    learning_rate,
    learning_rates,
    make_optimizer,
    select,
)

# Name, shape and sharding over (data=4, model=2) of parameters as a transformer has them.
PARAMS = {
    "embedding": ("vocab embed", (32, 16), (None, "data")),
    "blocks/q": ("layers embed heads head_dim", (8, 16, 4, 4), (None, "data", "model")),
    "blocks/qkv": ("layers embed qkv heads head_dim", (8, 8, 3, 2, 4), (None, "data", None, "model")),
    "blocks/qkv_bias": ("layers qkv heads head_dim", (8, 3, 2, 4), (None, None, "model")),
    "blocks/out": ("layers heads head_dim embed", (8, 4, 4, 16), (None, "model", None, "data")),
    "blocks/up": ("layers embed mlp", (8, 16, 64), (None, "data", "model")),
    "blocks/norm": ("layers embed", (8, 16), (None, "data")),
    "blocks/experts": ("layers experts embed mlp", (2, 4, 16, 8), (None, "data", None, "model")),
    "single/q": ("embed heads head_dim", (16, 4, 4), ("data", "model")),
    "final_norm": ("embed", (16,), ("data",)),
}
RULES = [
    AdamW(learning_rate=0.1),
    Lion(learning_rate=0.01),
    Muon(learning_rate=0.1),
    Adafactor(learning_rate=0.1, min_factored_size=8),
    Adafactor(learning_rate=0.1, min_factored_size=8, beta1=0.9),
]


def tree(seed: int) -> dict[str, NamedArray]:
    random = np.random.default_rng(seed)
    return {
        name: named(jnp.asarray(random.normal(size=shape).astype(np.float32)), names)
        for name, (names, shape, _) in PARAMS.items()
    }


def run(config, params, gradients, place=lambda tree: tree, **options):
    """Four steps; returns the parameters and the state."""
    optimizer = make_optimizer(
        config, Cosine(warmup_steps=2), steps=4, clip_norm=1.0, exclude=["norm", "bias"], **options
    )

    @jax.jit
    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = place(params)
    state = jax.jit(optimizer.init)(params)
    for seed in gradients:
        params, state = step(params, state, place(tree(seed)))
    return params, state


@functools.cache
def four_steps(config):
    """The parameters after them, on one device."""
    return run(config, tree(0), range(1, 5))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mode"),
    [*((rule, AxisType.Explicit) for rule in RULES), (RULES[2], AxisType.Auto)],
    ids=lambda value: getattr(value, "kind", value),
)
def test_sharded_equals_one_device(config, mode):
    """Four steps from the same gradients, to 1e-5 of each norm: sums in another order round differently."""
    alone = four_steps(config)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(mode, mode))
    shardings = {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, (_, _, spec) in PARAMS.items()}

    def place(values):
        return {name: jax.device_put(x, shardings[name]) for name, x in values.items()}

    with jax.set_mesh(mesh):
        sharded, state = run(config, tree(0), range(1, 5), place)
    for name, x in sharded.items():
        a, b = np.asarray(alone[name].array), np.asarray(x.array)
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a), name
        assert x.array.sharding.is_equivalent_to(shardings[name], x.ndim), name
    for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, NamedArray)):
        if isinstance(leaf, NamedArray):
            assert leaf.array.ndim == len(leaf.names), "names in the state fit their arrays"
    like = {leaf.sharding for leaf in jax.tree.leaves(state) if leaf.shape == PARAMS["blocks/up"][1]}
    assert all(s.is_equivalent_to(shardings["blocks/up"], 3) for s in like)


@pytest.mark.slow
@pytest.mark.parametrize("config", [r for r in RULES if getattr(r, "beta1", 0) is not None], ids=lambda r: r.kind)
def test_eight_bits_are_the_same_on_every_mesh(config):
    """Two steps: the first from the same bits, the second from what was rounded."""
    chosen = lambda p: "norm" not in p.path
    params, seeds = {n: x for n, x in tree(0).items() if n in ("blocks/out", "blocks/up", "final_norm")}, range(1, 3)
    place = lambda values: {name: values[name] for name in params}
    alone, kept = run(config, params, seeds, place, narrow=chosen)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    specs = {name: NamedSharding(mesh, PartitionSpec(*PARAMS[name][2])) for name in params}
    with jax.set_mesh(mesh):
        placed = lambda values: {name: jax.device_put(values[name], specs[name]) for name in params}
        sliced, state = run(config, params, seeds, placed, narrow=chosen)
    blocks = [x for x in jax.tree.leaves(state, is_leaf=_in_blocks) if _in_blocks(x)]
    assert blocks and all(b.scales.dtype == jnp.float8_e8m0fnu for b in blocks)
    assert any(str(b.scales.type) == "layers embed/data mlp_block/model" for b in blocks)
    for name in params:
        a, b = np.asarray(alone[name].array), np.asarray(sliced[name].array)
        assert np.linalg.norm(a - b) <= 2e-3 * np.linalg.norm(a), name  # a last bit may round to another number
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(state), strict=True):
        if a.dtype.itemsize == 1:
            assert (np.asarray(a).view(np.uint8) == np.asarray(b).view(np.uint8)).mean() > 0.97


def _in_blocks(x):
    return isinstance(x, Blocks)


@pytest.mark.parametrize("config", [r for r in RULES if getattr(r, "beta1", 0) is not None], ids=lambda r: r.kind)
def test_eight_bits_begin_without_rounding(config):
    """A compiler would round the zeros of a first state itself, for minutes."""
    params = {name: x for name, x in tree(0).items() if name in ("blocks/out", "blocks/up", "final_norm")}
    init = make_optimizer(config, Constant(warmup_steps=0), steps=1, narrow=lambda p: "norm" not in p.path).init
    assert "reduce_max" not in str(jax.make_jaxpr(init)(params))
    begun = [x.opened().array for x in jax.tree.leaves(init(params), is_leaf=_in_blocks) if _in_blocks(x)]
    assert {x.shape for x in begun} == {PARAMS[name][1] for name in ("blocks/out", "blocks/up")}
    assert not any(np.any(x) for x in begun)


def test_eight_bits_that_slices_cut_are_refused():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        up = named(jax.device_put(jnp.ones((4, 96)), NamedSharding(mesh, PartitionSpec(None, "data"))), "embed mlp")
        optimizer = make_optimizer(RULES[0], Constant(warmup_steps=0), steps=1, narrow=lambda p: True)
        with pytest.raises(
            UserError, match=r"8 slices of `mlp`, in blocks of 32, (.|\n)*slice `mlp` over 1 device at most"
        ):
            optimizer.init({"up": up})


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")
def test_adamw_is_optax_adamw():
    mask = {name: "norm" not in name and "bias" not in name for name in PARAMS}
    rates = learning_rates(Cosine(warmup_steps=2), 0.1, 4)
    reference = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rates, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=mask)
    )
    params = {name: x.array for name, x in tree(0).items()}
    state, update = reference.init(params), jax.jit(reference.update)
    for seed in range(1, 5):
        updates, state = update({n: g.array for n, g in tree(seed).items()}, state, params)
        params = optax.apply_updates(params, updates)
    ours = four_steps(AdamW(learning_rate=0.1))
    for name, x in params.items():
        np.testing.assert_allclose(ours[name].array, x, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_weight_decay_leaves_out_vectors_and_excluded_names():
    zero = jax.tree.map(jnp.zeros_like, tree(1))
    config = AdamW(learning_rate=0.5, weight_decay=0.1)
    optimizer = make_optimizer(config, Constant(warmup_steps=0), steps=1, exclude=["vocab"])
    params = tree(0)
    updates, _ = jax.jit(optimizer.update)(zero, jax.jit(optimizer.init)(params), params)
    moved = {name for name, u in updates.items() if np.any(np.asarray(u.array))}
    assert moved == {name for name in PARAMS if name not in ("embedding", "blocks/norm", "final_norm")}
    np.testing.assert_allclose(updates["blocks/up"].array, -0.05 * params["blocks/up"].array, rtol=1e-6)


@pytest.mark.slow
def test_muon_moves_matrices_by_orthogonal_ones():
    """Every matrix of the update has singular values near one another and the root mean square that was asked for."""
    config = Muon(learning_rate=1.0, weight_decay=0.0, update_rms=0.2)
    optimizer = make_optimizer(config, Constant(warmup_steps=0), steps=1)
    params = tree(0)
    updates, _ = jax.jit(optimizer.update)(tree(1), jax.jit(optimizer.init)(params), params)
    for name, rows in [("blocks/q", (8, 16, 16)), ("blocks/out", (8, 16, 16)), ("blocks/experts", (8, 16, 8))]:
        for matrix in np.asarray(updates[name].array).reshape(rows):
            values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * np.sqrt(max(matrix.shape)))
            assert values.min() > 0.1 and values.max() < 1.4, name
            assert np.median(values) == pytest.approx(1.0, abs=0.35)
    fused = np.asarray(updates["blocks/qkv"].array).transpose(0, 2, 1, 3, 4).reshape(24, 8, 8)
    for matrix in fused:  # queries, keys and values are matrices of their own
        values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * np.sqrt(8))
        assert values.min() > 0.1 and values.max() < 1.4
    # Adam's first step has every element at about 1.
    for name in ("embedding", "blocks/norm", "blocks/qkv_bias", "final_norm"):
        np.testing.assert_allclose(np.abs(updates[name].array), 1.0, atol=1e-3)


@pytest.mark.parametrize(
    ("names", "orthogonal"),
    [
        ("in out", True),
        ("layers hidden mlp", True),
        ("heads head_dim hidden", True),
        ("heads head_dim", False),
        ("hidden vocab", False),
    ],
)
def test_muon_takes_two_sides_for_a_matrix_whatever_their_names(names, orthogonal):
    shape = {"layers": 2, "in": 5, "hidden": 5, "out": 7, "mlp": 7, "vocab": 7, "heads": 2, "head_dim": 3}
    gradient = jnp.asarray(np.random.default_rng(0).normal(size=[shape[n] for n in names.split()]), jnp.float32)
    optimizer = make_optimizer(Muon(learning_rate=1.0, weight_decay=0.0), Constant(warmup_steps=0), steps=1)
    params = {"w": named(jnp.zeros_like(gradient), names)}
    updates, state = optimizer.update({"w": named(gradient, names)}, optimizer.init(params), params)
    size = np.abs(np.asarray(updates["w"].array))
    assert np.allclose(size, 1.0, atol=1e-3) != orthogonal, "Adam's first step has every element at about 1"
    if orthogonal:
        plain = {"w": gradient.reshape(-1, 5) if "heads" in names else gradient}
        alone = optimizer.update(plain, optimizer.init(plain), plain)[0]["w"].reshape(gradient.shape)
        np.testing.assert_allclose(updates["w"].array, alone, rtol=1e-5)


@pytest.mark.parametrize("layers", [2, 3])
def test_muon_leaves_experts_where_they_are_and_does_no_matrix_twice(layers):
    shape = (layers, 8, 8, 16)
    gradient = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    optimizer = make_optimizer(Muon(learning_rate=1.0, weight_decay=0.0), Constant(warmup_steps=0), steps=1)

    def update(gradient):
        tree = {"w": named(gradient, "layers experts embed mlp")}
        return optimizer.update(tree, optimizer.init(tree), tree)[0]["w"].array

    mesh = make_mesh(data=2, expert=4)
    sliced = jax.device_put(gradient, NamedSharding(mesh, PartitionSpec(None, "expert", "data")))
    with jax.set_mesh(mesh):
        on_mesh = jax.jit(update).lower(sliced).compile()
        rows = ledger(update, sliced).rows
    alone = jax.jit(update).lower(gradient).compile()
    np.testing.assert_allclose(on_mesh(sliced), alone(gradient), rtol=2e-4, atol=1e-5)
    assert [(row.kind, row.axes) for row in rows] == [("all-to-all", ("data",))] * 2
    assert flops(on_mesh) * 8 == flops(alone)


def test_muon_deals_matrices_out_over_the_largest_axis_that_divides_them():
    """Four layers over four devices, not over the two that the mesh has first."""
    gradient = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 16)), jnp.float32)
    optimizer = make_optimizer(Muon(learning_rate=1.0, weight_decay=0.0), Constant(warmup_steps=0), steps=1)

    def update(gradient):
        tree = {"w": named(gradient, "layers embed mlp")}
        return optimizer.update(tree, optimizer.init(tree), tree)[0]["w"].array

    mesh = make_mesh(data=2, data_y=4)
    sliced = jax.device_put(gradient, NamedSharding(mesh, PartitionSpec(None, ("data", "data_y"))))
    with jax.set_mesh(mesh):
        on_mesh = jax.jit(update).lower(sliced).compile()
    alone = jax.jit(update).lower(gradient).compile()
    np.testing.assert_allclose(on_mesh(sliced), alone(gradient), rtol=2e-4, atol=1e-5)
    assert flops(on_mesh) * 4 == flops(alone)


@pytest.mark.slow
def test_muon_adds_its_epsilon_to_the_norms_of_matrices():
    gradient = {"w": named(jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32), "embed mlp")}

    def size(epsilon):
        config = Muon(learning_rate=1.0, weight_decay=0.0, epsilon=epsilon)
        optimizer = make_optimizer(config, Constant(warmup_steps=0), steps=1)
        return jnp.abs(optimizer.update(gradient, optimizer.init(gradient), gradient)[0]["w"].array).max()

    assert size(1e-8) > 0.2 and size(1e6) < 0.01


def test_muon_refuses_a_weight_whose_sides_are_unknown():
    optimizer = make_optimizer(Muon(learning_rate=1.0), Constant(warmup_steps=0), steps=1)
    params = {"conv": named(jnp.ones((3, 4, 5)), "window in out")}
    with pytest.raises(UserError, match=r"two sides(.|\n)*f32\[window=3 in=4 out=5\] at `conv`(.|\n)*optax.partition"):
        optimizer.init(params)


@pytest.mark.slow
@pytest.mark.parametrize("config", RULES, ids=lambda rule: rule.kind)
def test_float16_is_as_float32(config):
    """Gradients of a thousandth to a millionth, whose squares float16 does not have."""
    optimizer = make_optimizer(config, Constant(warmup_steps=0), steps=2, clip_norm=1e-6)
    random = np.random.default_rng(0)
    made = [(random.normal(size=(16, 8)) * size).astype(np.float16) for size in (1.0, np.logspace(-6, -3, 8))]

    def steps(dtype):
        params, gradients = (
            {"w": named(jnp.asarray(x, dtype), "embed mlp"), "v": named(jnp.asarray(x[0], dtype), "mlp")} for x in made
        )
        state = optimizer.init(params)
        kept = [x.dtype for x in jax.tree.leaves(state)]
        for _ in range(2):
            updates, state = optimizer.update(gradients, state, params)
        assert [x.dtype for x in jax.tree.leaves(state)] == kept and jnp.float16 not in kept
        return updates

    for name, update in steps(jnp.float16).items():
        assert update.dtype == jnp.float16
        wanted = np.asarray(steps(jnp.float32)[name].array)
        np.testing.assert_allclose(update.array, wanted, rtol=0.05, atol=2e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("config", RULES, ids=lambda rule: rule.kind)
@pytest.mark.parametrize(
    ("leaf", "seen"), [(np.int32(3), r"i32\[\] at `n`"), (0.5, "0.5 at `n`"), (jax.random.key(0), r"key\[\] at `n`")]
)
def test_what_is_no_array_of_floats_is_refused(config, leaf, seen):
    optimizer = make_optimizer(config, Constant(warmup_steps=0), steps=1)
    with pytest.raises(UserError, match=rf"arrays of floats\.\n  seen:  {seen}\n(.|\n)*with None in its place"):
        optimizer.init({"w": jnp.ones((4, 3)), "n": leaf})


@pytest.mark.parametrize("config", RULES, ids=lambda rule: rule.kind)
def test_a_tree_without_parameters(config):
    optimizer = make_optimizer(config, Constant(warmup_steps=0), steps=1)
    assert optimizer.update({"n": None}, optimizer.init({"n": None}), {"n": None})[0] == {"n": None}


@pytest.mark.parametrize(
    ("config", "clip_norm"), [*((rule, None) for rule in RULES), (RULES[0], 1.0)], ids=lambda x: getattr(x, "kind", x)
)
def test_slices_of_a_manual_function_are_right_or_refused(config, clip_norm):
    """A device's own norm, or matrix, would be taken for that of the whole."""
    optimizer = make_optimizer(config, Constant(warmup_steps=0), steps=1, clip_norm=clip_norm)
    values = jnp.asarray(np.random.default_rng(0).normal(size=(8, 12)), jnp.float32)
    update = lambda x: optimizer.update({"w": x}, optimizer.init({"w": x}), {"w": x})[0]["w"]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    spec = PartitionSpec("data", "model")
    with jax.set_mesh(mesh):
        by_slice = jax.jit(jax.shard_map(update, in_specs=spec, out_specs=spec))
        x = jax.device_put(values, NamedSharding(mesh, spec))
        if clip_norm is None and config.kind in ("adamw", "lion"):
            np.testing.assert_allclose(by_slice(x), update(x), rtol=1e-6)
        else:
            with pytest.raises(UserError, match=r"slice along data, model of `w`(.|\n)*update outside of it"):
                by_slice(x)


@pytest.mark.slow
def test_learning_rate_is_the_one_that_was_used():
    _, state = run(AdamW(learning_rate=0.1), tree(0), range(1, 4))
    assert float(learning_rate(state)) == float(learning_rates(Cosine(warmup_steps=2), 0.1, 4)(2))


def test_clipping_does_not_depend_on_the_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    whole = jnp.arange(64.0).reshape(8, 8)
    with jax.set_mesh(mesh):
        sliced = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("data")))
        clipped, _ = jax.jit(lambda g: optax.clip_by_global_norm(1.0).update(g, optax.EmptyState()))(sliced)
    np.testing.assert_allclose(clipped, whole / np.linalg.norm(whole), rtol=1e-6)


def test_a_step_that_is_not_finite_changes_nothing():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        old = jax.device_put(np.arange(16, dtype=np.float32), sharding)

        @jax.jit
        def step(old, gradient):
            return select(all_finite(jnp.float32(1.0), optax.tree.norm(gradient)), {"w": old - gradient}, {"w": old})

        good = jax.device_put(np.ones(16, np.float32), sharding)
        bad = jax.device_put(np.where(np.arange(16) == 3, np.nan, 1.0).astype(np.float32), sharding)
        np.testing.assert_array_equal(step(old, good)["w"], np.arange(16.0) - 1)
        np.testing.assert_array_equal(step(old, bad)["w"], np.arange(16.0))
        assert step(old, bad)["w"].sharding == old.sharding


def test_average():
    """From the parameters themselves towards new ones: fast at first, then by the decay."""
    ema, new = {"w": jnp.zeros(2)}, {"w": jnp.ones(2)}
    first = average(ema, new, 0.9, 0)["w"]
    late = average(ema, new, 0.9, 10_000)["w"]
    np.testing.assert_allclose(first, 0.9, rtol=1e-6)  # kept: 1 / 10
    np.testing.assert_allclose(late, 0.1, rtol=1e-5)
