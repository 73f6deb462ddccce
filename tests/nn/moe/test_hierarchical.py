"""Tokens to their experts in two steps: what they make, whomever tokens choose, and what crosses the first axis."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.nn.moe.emulated import ragged_all_to_all
from trellis.inspect import ledger
from trellis.mesh import Layout, make_mesh
from trellis.named import named, shard
from trellis.nn.moe import ExpertsError, choose, exchange_experts, hierarchical_experts, mix, mixing, score
from trellis.nn.moe.mixing import check_way
from trellis.nn.moe.share import Places

TOKENS, EMBED, COUNT, CHOICES = 6, 3, 2, 3
BOTH = ("x", "y")
MESHES = {"2 x 4": (2, 4), "4 x 2": (4, 2), "one part": (1, 4), "one device a part": (4, 1)}


def compute(rows, sizes, weights):
    """Expert e of a device scales by e + 1; the devices differ too. Rows of nobody become what is no number."""
    expert = (jnp.arange(rows.shape[0])[:, None] >= jnp.cumsum(sizes)[None]).sum(1, dtype=jnp.float32)
    device = jax.lax.axis_index(BOTH).astype(jnp.float32)
    return rows * (jnp.where(expert < COUNT, expert + 1.0 + 10.0 * device, jnp.nan) * weights)[:, None]


def given(load, devices):
    """Tokens, the experts that they chose, and what these count, of all devices."""
    random, experts, count = np.random.default_rng(0), devices * COUNT, devices * TOKENS
    ids = np.stack([random.permutation(experts)[:CHOICES] for _ in range(count)])
    if load == "one part":
        ids = np.tile([2, 3, 0], (count, 1))
    if load == "dropped":
        ids[random.random(ids.shape) < 0.4] = experts
    if load == "all dropped":
        ids[:] = experts
    weights = np.where(ids < experts, random.random(ids.shape), 0.0)
    x = random.normal(size=(count, EMBED))
    return x.astype(np.float32), ids.astype(np.int32), weights.astype(np.float32)


def put(arrays, mesh):
    return [jax.device_put(a, jax.NamedSharding(mesh, P(BOTH))) for a in arrays]


def program(mesh, **options):
    how = functools.partial(hierarchical_experts, compute=compute, axes=BOTH, count=COUNT, **options)
    return jax.shard_map(how, mesh=mesh, in_specs=(P(BOTH),) * 3, out_specs=P(BOTH))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "ragged", "slack", "most"),
    [
        *itertools.product(["2 x 4", "4 x 2"], [True, False], [0.3], [None]),
        ("one part", True, 1.5, None),
        ("one part", False, 0.3, None),
        ("one device a part", True, 0.3, None),
        ("one device a part", False, 1.5, None),
        ("4 x 2", True, 1.5, 1),  # tokens have experts in more parts than the router is said to allow
    ],
)
def test_every_token_finds_its_experts(mesh, ragged, slack, most, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    devices = int(np.prod(MESHES[mesh]))
    made = make_mesh(jax.devices()[:devices], **dict(zip(BOTH, MESHES[mesh], strict=True)))
    fn, by_place = program(made, ragged=ragged, slack=slack, most=most), np.arange(1.0, EMBED + 1)

    def loss(*arrays):
        out = fn(*arrays)
        return (out * jnp.asarray(by_place, jnp.float32)[None]).sum(), out

    run = jax.jit(jax.value_and_grad(loss, (0, 2), has_aux=True))
    for load in ("random", "one part", "dropped", "all dropped"):
        x, ids, weights = given(load, devices)
        with jax.set_mesh(made):
            (_, out), (d_x, d_weights) = run(*put((x, ids, weights), made))
        each = np.where(ids < devices * COUNT, ids % COUNT + 1.0 + 10.0 * (ids // COUNT), 0.0)
        scale = (each * weights).sum(1, keepdims=True)
        np.testing.assert_allclose(out, x * scale, rtol=1e-5, atol=1e-4, err_msg=load)
        np.testing.assert_allclose(d_x, by_place * scale, rtol=1e-5, atol=1e-4, err_msg=load)
        np.testing.assert_allclose(d_weights, each * (x * by_place).sum(1)[:, None], rtol=1e-5, atol=1e-4, err_msg=load)


@pytest.mark.slow
def test_what_crosses_the_first_axis():
    """A token with all its experts in one part goes there once; in one step it goes once for each of them."""
    mesh = make_mesh(jax.devices()[:4], x=2, y=2)
    with jax.set_mesh(mesh):
        arrays = put(given("one part", 4), mesh)
        steps = ledger(program(mesh, ragged=True, slack=1.0, most=1), *arrays)
        how = functools.partial(exchange_experts, compute=compute, axes=BOTH, count=COUNT, ragged=True, slack=1.0)
        once = ledger(jax.shard_map(how, mesh=mesh, in_specs=(P(BOTH),) * 3, out_specs=P(BOTH)), *arrays)
    there = lambda found: {row.axis: row.wire for row in reversed(found.rows) if row.note.startswith("at most")}
    row = 4 * EMBED
    assert there(steps) == {"x": row * TOKENS // 2, "y": row * TOKENS * CHOICES // 2}
    assert there(once) == {"x,y": row * TOKENS * CHOICES * 3 // 4}


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "axes"), [("cuda", {"x", "y"}), ("tpu", {"x,y"})])
def test_by_itself_it_is_taken_where_links_are_not_a_torus_s(platform, axes, monkeypatch):
    monkeypatch.setattr(mixing, "platform_of", lambda array: platform)
    sizes = {"batch": 4, "pos": 2, "embed": 8, "mlp": 4, "experts": 8, "routes": 8}
    draw = lambda names: named(jnp.ones([sizes[name] for name in names.split()]), names)
    weights = (draw("experts embed mlp"), draw("experts embed mlp"), draw("experts mlp embed"))
    over = {"experts": BOTH, "batch": BOTH}
    with Layout(make_mesh(jax.devices()[:4], x=2, y=2), {"experts": BOTH}, over):
        x, router, *weights = shard((draw("batch pos embed"), draw("embed routes"), *weights), "compute")
        found = ledger(lambda x, router, *weights: mix(x, choose(score(x, router), 2), *weights), x, router, *weights)
    assert {row.axis for row in found if row.kind == "all-to-all"} == axes


def test_refused():
    with pytest.raises(ExpertsError) as error:
        check_way("hierarchical", Places(batch=("expert",), experts=("expert",)), "cuda")
    assert str(error.value) == (
        "A hierarchical exchange needs experts sliced over two mesh axes or more, the slowest first.\n  seen:  "
        "hierarchical: experts/expert\n  where: model.routing.way\n  fix:   use ragged or auto, or set mesh.expert_y "
        "to the number of hosts that experts are sliced over and mesh.expert to the number of devices on each"
    )
    with pytest.raises(ExpertsError, match="that slice both experts and tokens"):
        check_way("hierarchical", Places(batch=("expert",), experts=("expert_y", "expert")), "cuda")
    mesh = make_mesh(jax.devices()[:4], x=2, y=2)
    with jax.set_mesh(mesh), pytest.raises(ExpertsError, match="`slack` must be more than 0"):
        jax.eval_shape(program(mesh, ragged=True, slack=0.0), *put(given("random", 4), mesh))
