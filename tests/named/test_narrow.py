"""Products in eight bits: their numbers to the bit, on every layout, and what a gather of them moves."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import trellis as tr
from trellis.mesh.topology import target_devices
from trellis.named import scaled

LAYOUTS = {
    "one device": None,
    "data": ({"data": 8}, {}, {"batch": "data"}),
    "FSDP": ({"data": 8}, {"embed": "data"}, {"batch": "data"}),
    "tensor": ({"data": 4, "model": 2}, {"embed": "data", "mlp": "model"}, {"batch": "data", "mlp": "model"}),
    "sequence": (
        {"data": 4, "model": 2},
        {"embed": "data", "mlp": "model"},
        {"batch": "data", "mlp": "model", "pos": "model"},
    ),
}
# Left to the compiler, a sliced batch alone is a part of FSDP.
MESHES = {"explicit": ("data", "FSDP", "tensor", "sequence"), "auto": ("FSDP", "tensor", "sequence")}


def layout_of(name: str, axis_type: str = "explicit"):
    if LAYOUTS[name] is None:
        return contextlib.nullcontext()
    sizes, params, compute = LAYOUTS[name]
    return tr.Layout(tr.make_mesh(axis_type=axis_type, **sizes), params=params, compute=compute)


KINDS = ("fp8", "int8", "mxfp8")


def drawn(embed=32, pos=8):
    """Weights and activations; where tiles of 32 numbers are sliced, `embed` and `pos` hold several of them."""
    draw = lambda key, **axes: tr.random.normal(jax.random.key(key), axes)
    weights = draw(0, embed=embed, mlp=64) * 0.2, draw(1, mlp=64, embed=embed) * 0.2
    return *weights, draw(2, batch=16, pos=pos, embed=embed)


def loss_of(kind):
    def loss(weights, x):
        up, down = (tr.Narrow(w, kind) for w in weights)
        h = tr.gelu(tr.einsum("batch pos embed, embed mlp -> batch pos mlp", x, up))
        y = tr.dot(h, down, over="mlp")
        return ((y - x) ** 2).mean().array

    return loss


def to_numpy(tree):
    return [np.asarray(jax.device_get(leaf)) for leaf in jax.tree.leaves(tree)]


def emulated(x: np.ndarray, kind: str, gradient: bool = False):
    """A narrow array as the numbers that it stands for, in float64, by `ml_dtypes` alone, and its scale."""
    if kind == "mxfp8":
        tiles = x.reshape(-1, min(32, len(x)), x.shape[1] // 32, 32).astype(np.float64)
        scales = 2.0 ** np.ceil(np.log2(np.abs(tiles).max((1, 3), keepdims=True) / 448))
        values = (tiles / scales).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return (values * scales).reshape(x.shape), np.float32(1)
    if kind == "int8":
        scale = np.float32(np.abs(x).max()) / np.float32(127)
        return np.round(np.clip(x / scale, -127, 127)).astype(np.float64), scale
    dtype = ml_dtypes.float8_e5m2 if gradient else ml_dtypes.float8_e4m3fn
    scale = np.float32(np.abs(x).max()) / np.float32(ml_dtypes.finfo(dtype).max)
    return (x / scale).astype(dtype).astype(np.float64), scale


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_ml_dtypes(kind):
    """A sum of 32 products of few bits is exact in float32, so that the product has one right value; over two tiles of
    different scale it may be rounded once. Of int8 the weight's gradient is made of the result's as it is."""
    w, _, x = drawn()
    x = x["batch", 0]
    out, pull = jax.vjp(lambda x, w: tr.dot(x, tr.Narrow(w, kind), over="embed"), x, w)
    gradient = tr.random.normal(jax.random.key(3), out.shape)
    dx, dw = pull(gradient)
    (qx, sx), (qw, sw) = emulated(np.asarray(x.array), kind), emulated(np.asarray(w.array), kind)
    qg, sg = emulated(np.asarray(gradient.array), kind, gradient=True)
    of_w = (qx.T @ np.asarray(gradient.array, np.float64), sx) if kind == "int8" else (qx.T @ qg, sx * sg)
    for found, product, scale in ((out, qx @ qw, sx * sw), (dx, qg @ qw.T, sg * sw), (dw, *of_w)):
        few = 3e-7 * np.abs(product * scale).max() if kind == "mxfp8" or (kind == "int8" and found is dw) else 0
        np.testing.assert_allclose(found.array, product.astype(np.float32) * scale, rtol=0, atol=few)


@functools.cache
def one_device(kind):
    up, down, x = drawn(*((256, 64) if kind == "mxfp8" else ()))
    return to_numpy(jax.jit(jax.value_and_grad(loss_of(kind), (0, 1)))((up, down), x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis_type", ["explicit", "auto"])
def test_every_layout_gives_one_device_s_numbers(kind, axis_type):
    (up, down, x), wanted = drawn(*((256, 64) if kind == "mxfp8" else ())), one_device(kind)
    step = jax.value_and_grad(loss_of(kind), (0, 1))
    for name in MESHES[axis_type]:
        with layout_of(name, axis_type):
            found = to_numpy(tr.named_jit(step)(tr.shard((up, down)), tr.shard(x, "compute")))
        for a, b in zip(found, wanted, strict=True):
            few = 2e-5 if kind == "mxfp8" else 2e-6  # of many gradients a last bit may round to another number
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=few * np.abs(b).max(), err_msg=name)


@pytest.mark.slow
def test_narrow_weights_are_gathered_narrow_and_their_gradients_settle_wide():
    up, down, x = drawn()
    with layout_of("sequence"):
        moved = tr.ledger(jax.value_and_grad(loss_of("fp8")), tr.shard((up, down)), tr.shard(x, "compute"))
    gathers = [row for row in moved.rows if row.kind == "all-gather" and row.direction == "forward"]
    # One byte an element of which a device sends 3/4 over data, twice, and 1/2 over model, once.
    assert sorted(row.wire for row in gathers) == [16 * 8 * 32 // 4 // 2] + 2 * [32 * 64 // 2 * 3 // 4]
    assert all(row.dtype == "f8_e4m3fn" for row in gathers)
    scatters = [row for row in moved.rows if row.kind == "reduce-scatter" and "data" in row.axes]
    assert len(scatters) == 2 and all(row.wire == 4 * 32 * 64 // 2 * 3 // 4 for row in scatters)


@pytest.mark.slow
def test_scales_of_tiles_have_names_and_are_gathered_with_their_numbers():
    up, down, x = drawn(256, 64)
    with layout_of("FSDP"):
        moved = tr.ledger(jax.value_and_grad(loss_of("mxfp8")), tr.shard((up, down)), tr.shard(x, "compute"))
    gathers = [row for row in moved.rows if row.kind == "all-gather"]
    assert sorted((row.dtype, row.wire) for row in gathers) == 2 * [("f8_e4m3fn", 256 * 64 * 7 // 8)] + 2 * [
        ("f8_e8m0fnu", 8 * 2 * 7 // 8)
    ]
    assert any("embed_block/data mlp_block" in str(row) for row in gathers)


@pytest.mark.slow
def test_tiles_that_slices_cut_are_refused():
    up, down, x = drawn()
    with layout_of("FSDP"), pytest.raises(tr.NamesError, match="got 8 slices of dimension 0 .* in tiles of 32"):
        loss_of("mxfp8")(tr.shard((up, down)), tr.shard(x, "compute"))


@pytest.mark.slow
def test_a_blackwell_gpu_multiplies_tiles_with_their_scales(monkeypatch):
    """What JAX gives its compiler, by a stand-in with the same meaning: rows, sums and scales are where they belong."""
    calls = []

    def stand_in(a, b, sa, sb, preferred_element_type):
        calls.append((a.shape, sa.shape))
        wide = [x.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), 32, 2) for x, s in ((a, sa), (b, sb))]
        return jnp.einsum("bmk,bnk->bmn", *wide, preferred_element_type=preferred_element_type)

    up, down, x = drawn(256, 64)
    step = jax.value_and_grad(loss_of("mxfp8"), (0, 1))
    wanted = to_numpy(jax.jit(step)((up, down), x))
    monkeypatch.setattr(scaled, "multiplies_blocks", lambda a: True)
    monkeypatch.setattr(jax.nn, "scaled_matmul", stand_in)
    with layout_of("sequence"):
        found = to_numpy(tr.named_jit(step)(tr.shard((up, down)), tr.shard(x, "compute")))
    assert calls[0] == ((1, 16 // 4 * 64, 256), (1, 16 // 4 * 64, 8)) and len(calls) == 6
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())


@pytest.mark.slow
def test_the_compiler_s_program_for_v5e_multiplies_and_gathers_int8():
    mesh = tr.make_mesh(target_devices("v5e:2x2"), data=4)

    def abstract(spec, dtype, **axes):
        sharding = jax.NamedSharding(mesh, jax.P(*spec))
        return tr.NamedArray(jax.ShapeDtypeStruct(tuple(axes.values()), dtype, sharding=sharding), tuple(axes))

    up = abstract(["data", None], jnp.bfloat16, embed=512, mlp=1024)
    down = abstract([None, "data"], jnp.bfloat16, mlp=1024, embed=512)
    x = abstract(["data", None, None], jnp.bfloat16, batch=8, pos=128, embed=512)
    with tr.Layout(mesh, params={"embed": "data"}, compute={"batch": "data"}):
        step = jax.grad(lambda weights, x: loss_of("int8")(weights, x).astype(jnp.float32))
        text = tr.named_jit(step).lower((up, down), x).compile().as_text()
    products = re.findall(r"= (\w+)\[[\d,]*\]\S* convolution\(", text)
    # Two forward, and the gradient of what is between the layers; those of the weights are of factors not rounded.
    assert sorted(products) == ["f32"] * 2 + ["s32"] * 3
    gathered = re.findall(r"= (\w+)\[[\d,]*\]\S* all-gather(?:-start)?\(", text)
    assert gathered == 2 * ["s8"]


@pytest.mark.slow
def test_an_array_of_zeros_stays_zeros_and_what_is_not_finite_shows():
    w = tr.ones({"embed": 4, "mlp": 2})
    zeros = tr.dot(tr.zeros({"batch": 2, "embed": 4}), tr.Narrow(w, "fp8"), over="embed")
    assert not zeros.array.any()
    x = tr.named(np.array([[1, np.inf, 1, 1]], np.float32), "batch embed")
    for kind in KINDS:
        assert not np.isfinite(tr.dot(x, tr.Narrow(w, kind), over="embed").array).any()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_what_is_no_number_shows_on_every_device(kind):
    """int8 has none, and a maximum over devices may leave one out: XLA's on a CPU does."""
    x, w = tr.ones({"batch": 8, "embed": 8}), tr.ones({"embed": 8, "mlp": 4})
    x = x.with_array(x.array.at[3, 2].set(jnp.nan))

    def products(x, w):
        dot = lambda x, w, largest=None: tr.dot(x, tr.Narrow(w, kind, largest=largest), over="embed")
        pull = jax.vjp(lambda largest: dot(x, w, largest), jnp.ones(3))[1]
        return dot(x, w), pull(tr.ones({"batch": 8, "mlp": 4}))[0]

    with tr.Layout(tr.make_mesh(data=8), params={"embed": "data"}, compute={"batch": "data"}):
        out, met = tr.named_jit(products)(tr.shard(x), tr.shard(w, "params"))
    assert not np.isfinite(out.array).any()
    np.testing.assert_array_equal(met, [np.inf, 1, 1])  # also of delayed scales, by which int8 makes it a number


@pytest.mark.slow
def test_gradients_whose_scale_is_below_the_least_normal_number_are_finite():
    x, w = tr.ones({"batch": 2, "embed": 4}), tr.ones({"embed": 4, "mlp": 2})
    pull = jax.vjp(lambda x: tr.dot(x, tr.Narrow(w, "fp8"), over="embed"), x)[1]
    assert np.isfinite(pull(tr.named(jnp.array([[1e-36, 0.0], [1e-37, 0.0]]), "batch mlp"))[0].array).all()


@pytest.mark.parametrize("kind", ["fp8", "int8", "mxfp8", "nvfp4"])
def test_a_product_of_no_numbers(kind):
    loss = lambda x, w: tr.dot(x, tr.Narrow(w, kind), over="embed").sum()
    with layout_of("FSDP"):
        for batch, embed in ((0, 32), (8, 0)):
            factors = tr.zeros({"batch": batch, "embed": embed}), tr.zeros({"embed": embed, "mlp": 16})
            # In one program: of no columns JAX 0.12 cannot give a pending sum by itself, whatever the product is of.
            made, slopes = jax.jit(tr.value_and_grad(loss, (0, 1)))(*factors)
            assert not float(made) and [y.shape for y in slopes] == [x.shape for x in factors]


@pytest.mark.slow
def test_scales_keep_small_and_large_numbers():
    x, w = tr.full({"batch": 2, "embed": 4}, 1e-6), tr.full({"embed": 4, "mlp": 2}, 1e5)
    for kind in KINDS:
        near = 0.07 if kind == "mxfp8" else 1e-6  # a power of two leaves each number to the type's rounding
        np.testing.assert_allclose(tr.dot(x, tr.Narrow(w, kind), over="embed").array, 0.4, rtol=near)


@pytest.mark.slow
def test_a_second_derivative_is_refused():
    w, _, x = drawn()
    loss = lambda x: (tr.dot(x, tr.Narrow(w, "fp8"), over="embed") ** 2.0).mean().array
    for second in (jax.hessian(loss), jax.jacfwd(jax.jacfwd(loss)), jax.jacrev(jax.jacrev(loss))):
        with pytest.raises(
            tr.NamesError, match="a narrow product can only be differentiated once, got a second derivative"
        ):
            second(x["batch", 0]["pos", 0])


def test_a_narrow_product_has_two_factors_of_one_kind():
    w, down, x = drawn()
    with pytest.raises(tr.NamesError, match="a narrow product must have two factors of one kind"):
        tr.dot(x, tr.Narrow(w, "fp8"), tr.Narrow(down.rename(embed="out"), "int8"), over=("embed", "mlp"))
    with pytest.raises(tr.NamesError, match="a narrow product must have two factors"):
        tr.einsum("batch pos embed, embed mlp, mlp -> batch pos", x, tr.Narrow(w, "fp8"), tr.ones({"mlp": 64}))


@pytest.mark.parametrize(
    "misused, said",
    [
        (lambda x: tr.dot(x, tr.Narrow(x, "fp4"), over="a"), "in one of fp8, int8, mxfp8, nvfp4, got 'fp4'"),
        (lambda x: tr.dot(x, tr.Narrow(x.astype(jnp.int32), "fp8"), over="a"), "needs floats, got i32"),
        (lambda x: x + tr.Narrow(x, "fp8"), "takes named arrays and numbers, got Narrow in add"),
        (lambda x: tr.tanh(tr.Narrow(x, "fp8")), "got Narrow in tanh"),
        (lambda x: tr.Narrow(x, "fp8") / x, "got Narrow in true_divide"),
        (lambda x: tr.sum(tr.Narrow(x, "fp8"), "a"), "got Narrow in sum"),
        (lambda x: tr.mean(tr.Narrow(x, "fp8")), "got Narrow in mean"),
        (lambda x: x.at["a", 0].set(tr.Narrow(x, "fp8")), r"got Narrow in at\[...\].set"),
        (lambda x: x * [1.0, 2.0], "got list in multiply"),
    ],
)
def test_a_narrow_weight_is_a_factor_and_nothing_else(misused, said):
    with pytest.raises(tr.NamesError, match=said):
        misused(tr.ones({"a": 2}))


def test_in_manual_mode_a_narrow_product_is_refused():
    mesh = tr.make_mesh(data=8)

    @tr.shard_map
    def product(x: tr.f32["batch/data embed"], w: tr.f32["embed mlp"]) -> tr.f32["batch/data mlp"]:
        x, w = tr.named(x, "batch/data embed"), tr.named(w, "embed mlp")
        return tr.dot(x, tr.Narrow(w, "fp8"), over="embed").array

    with jax.set_mesh(mesh), pytest.raises(tr.NamesError, match="manual mode"):
        product(jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, jax.P("data"))), jnp.ones((4, 2)))


def test_what_a_narrow_weight_has_not_is_said():
    weight = tr.Narrow(tr.ones({"embed": 4, "mlp": 2}), "fp8")
    assert not hasattr(weight, "array") and not hasattr(weight, "nosuch")
    with pytest.raises(tr.NamesError, match=r"got \.array of f32\[embed=4 mlp=2\], whose products are fp8"):
        _ = weight.array


def test_where_nothing_is_differentiated_only_narrow_numbers_move():
    """Also in loops: what the derivative alone would take is in no program without one."""
    layout = tr.Layout(tr.make_mesh(data=4, model=2), params={"embed": "data"}, compute={"batch": "data"})

    def layers(x, weights):
        step = lambda x, w: (tr.dot(x, tr.Narrow(w, "int8"), over="embed").rename(mlp="embed"), None)
        return tr.scan(step, "layers")(x, weights)[0]

    with layout:
        weights = tr.shard(tr.ones({"layers": 3, "embed": 32, "mlp": 32}))
        rows = tr.ledger(layers, tr.ones({"batch": 16, "embed": 32}), weights).rows
    assert {row.dtype for row in rows if row.kind == "all-gather"} == {"i8"}


def test_slices_that_would_cut_blocks_are_refused_by_the_names_of_the_array():
    x, w = tr.named(np.ones((32, 96), np.float32), "batch embed"), tr.named(np.ones((96, 96), np.float32), "embed mlp")
    with tr.Layout(tr.make_mesh(data=4, model=2), compute={"mlp": "data"}):
        with pytest.raises(tr.NotationError, match="got mlp=96, 3 blocks of 32, over data=4, in a product"):
            tr.named_jit(lambda x, w: tr.dot(x, tr.Narrow(w, "mxfp8"), over="embed"))(x, tr.shard(w))
