"""The ledger's rows: what, where, how often, in which pass, and from which line."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from tests.inspect.programs import BLOCK, STACK, gradient, layers, manual, partly_manual, tensor_parallel
from trellis import f32
from trellis.inspect import Ledger, Row, collectives, compare, ledger, structure_of
from trellis.inspect.rows import wire_bytes

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def types(arguments, mesh=MESH):
    return [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, p)) for s, p, d in arguments]


def placed(shape, *partitions, mesh=MESH):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*partitions)))


def short(rows):
    return [(row.kind, row.axis, row.what, row.times, row.direction) for row in rows]


def test_a_tensor_parallel_block_under_fsdp():
    """Megatron's count, one all-reduce each way; two gathers and one reduce-scatter for each weight."""
    rows = short(ledger(gradient(layers(tensor_parallel)), *types(STACK)))
    x, up, down = "8/data 16 32", "32 64/model", "64/model 32"
    gather_up = ("all-gather", "data", "32/data 64/model -> 32 64/model ~data", 3)
    gather_down = ("all-gather", "data", "64/model 32/data -> 64/model 32 ~data", 3)
    assert rows == [
        (*gather_up, "forward"),
        (*gather_down, "forward"),
        ("all-reduce", "model", f"{x} +model -> {x}", 3, "forward"),
        (*gather_up, "recomputed"),
        (*gather_down, "recomputed"),
        ("reduce-scatter", "data", f"{down} +data -> 64/model 32/data", 3, "backward"),
        ("reduce-scatter", "data", f"{up} +data -> 32/data 64/model", 3, "backward"),
        ("all-reduce", "model", f"{x} +model -> {x}", 3, "backward"),
    ]


def test_bytes_of_that_block():
    found = ledger(gradient(layers(tensor_parallel)), *types(STACK))
    weight, stream = 32 * 64 * 4 // 2, 8 * 16 * 32 * 4 // 4  # bytes of one gathered weight, of one device's stream
    assert found.total(kind="all-gather", direction="forward") == 3 * 2 * weight * 3 // 4
    assert found.total(kind="reduce-scatter") == 3 * 2 * weight * 3 // 4
    assert found.per_axis() == {"data": 3 * 6 * weight * 3 // 4, "model": 3 * 2 * stream}
    assert found.per_kind() == {
        "all-gather": found.total(kind="all-gather"),
        "reduce-scatter": found.total(kind="reduce-scatter"),
        "all-reduce": 3 * 2 * stream,
    }
    assert found.count(kind="all-reduce") == 6
    assert found.mesh == {"data": 4, "model": 2}


def test_the_line_that_caused_it():
    def program(x):
        return jax.reshard(x, P(None, None))  # the line of the row

    (row,) = ledger(program, placed((8, 4), "data", None)).rows
    line = program.__code__.co_firstlineno + 1
    assert row.source == f"test_ledger.py:{line} (program)"
    (backward,) = ledger(jax.grad(lambda x: jnp.sum(jax.reshard(x, P("data", None)) ** 2)), placed((8, 4))).rows
    assert backward.direction == "backward" and backward.source.startswith("test_ledger.py:")


def test_names_come_from_the_scope():
    def program(w):
        with jax.named_scope("reshard[embed/data mlp -> embed mlp ~data]"):
            w = jax.reshard(w, P(None, None, reduced={"data"}))
        return jnp.sum(jnp.ones((8, 8), out_sharding=P("data", None)) @ w)

    rows = ledger(jax.grad(program), placed((8, 4), "data", None)).rows
    assert [row.what for row in rows] == ["embed mlp +data -> embed/data mlp"]
    assert rows[0].kind == "reduce-scatter" and rows[0].direction == "backward"
    (row,) = (row for row in ledger(program, placed((8, 4), "data", None)).rows if row.kind == "all-gather")
    assert row.what == "embed/data mlp -> embed mlp ~data"


def test_a_mesh_axis_of_one_moves_nothing():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    assert ledger(gradient(tensor_parallel), *types(BLOCK, mesh)).rows == ()


def test_dead_code_moves_nothing():
    def program(x):
        jax.reshard(x, P(None, None))
        return x * 2

    assert str(ledger(program, placed((8, 4), "data", None))) == "no communication"


@pytest.mark.parametrize("dead", ["carry", "code"])
def test_dead_code_of_a_while_loop_moves_nothing(dead):
    """What a turn computes and nothing carries, and what is carried and nothing reads; and what is given for it."""

    def program(x, scale):
        whole = jax.reshard(scale, P(None, None)) * 2  # given to the loop for what nothing reads

        def turn(state):
            x, other, i = state
            moved = jax.reshard(jax.reshard(other, P(None, None)) * whole, P("data", None))
            return jnp.tanh(x), moved if dead == "carry" else other, i + 1

        return jax.lax.while_loop(lambda state: state[2] < 3, turn, (x, x + 1, jnp.int32(0)))[0]

    def nested(x, scale):
        return jax.lax.scan(lambda x, _: (program(x, scale), None), x, None, length=2)[0]

    given = [placed((8, 4), "data", None)] * 2
    for function in (program, nested, jax.jit(program)):
        assert str(ledger(function, *given)) == "no communication"


@pytest.mark.parametrize("read", ["its end", "a later carry"])
def test_what_a_while_loop_reads_stays(read):
    def program(x):
        def turn(state):
            x, other, i = state
            mean = jnp.mean(jax.reshard(other, P(None, None)))
            return (x + mean if read == "a later carry" else x * 2), other * 2, i + 1

        def goes_on(state):
            _, other, i = state
            return (i < 3) & (jnp.max(jax.reshard(other, P(None, None))) < 9 if read == "its end" else True)

        return jax.lax.while_loop(goes_on, turn, (x, x + 1, jnp.int32(0)))[0]

    assert ledger(program, placed((8, 4), "data", None)).total(kind="all-gather") > 0


def test_a_number_that_fills_an_array_does_not_move():
    mesh = tr.make_mesh(data=8)
    like = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P()))
    filled = lambda number: jnp.full((8,), number, out_sharding=P("data"))
    with jax.set_mesh(mesh):
        assert not ledger(lambda x: jnp.maximum(x, jax.reshard(filled(-1.0), P())), like).rows
        assert ledger(lambda x: jnp.maximum(x, jax.reshard(filled(x[0]), P())), like).rows


def test_a_sum_of_no_elements_moves_nothing():
    def program(x):
        return tr.dot(x, x.rename(embed="other"), over="batch"), x.max("batch", initial=-1.0), x.sum("batch")

    layout = tr.Layout(tr.make_mesh(data=4, model=2), compute={"batch": "data"})
    with layout:
        sizes = [tr.shard(tr.ones({"batch": size, "embed": 2}), "compute") for size in (0, 4)]
        assert [ledger(program, x).count() for x in sizes] == [0, 4]
        assert structure_of(ledger(program, sizes[0]), jax.jit(program).lower(sizes[0]).compile(), layout.mesh).right


def test_a_loop_without_a_known_length_counts_a_turn():
    def program(x):
        def turn(state):
            return state[0] + jnp.max(state[0]), jax.reshard(jax.reshard(state[0], P(None, None)), P("data", None))

        return lax.while_loop(lambda state: jnp.sum(state[1]) > 0, turn, (x, x))

    found = ledger(program, placed((8, 4), "data", None))
    assert {row.note for row in found} == {"once a turn of a while loop"}
    assert [row.kind for row in found] == ["all-reduce", "all-reduce", "all-gather"][: len(found)]


def test_devices_tell_each_other_whether_an_example_of_a_mapped_loop_goes_on():
    """JAX computes the condition of each example in the body, too, which then keeps those that are done."""
    layout = tr.Layout(tr.make_mesh(jax.devices()[:4], data=2, model=2), compute={"batch": "data", "embed": "model"})
    goes_on = lambda row: row.sum("embed") < 8
    with layout:
        x = tr.shard(tr.ones({"batch": 4, "embed": 2}), "compute")
        found, compiled = {}, {}
        for each in (tr.vmap, tr.map):
            run = tr.named_jit(each(lambda row: tr.while_loop(goes_on, lambda row: row + 1, row), "batch"))
            found[each] = ledger(run, x)
            compiled[each] = collectives(run.lower(x).compile(), layout.mesh)
        plain = ledger(
            lambda x: jax.vmap(lambda x: lax.while_loop(lambda x: x.sum() < 8, lambda x: x + 1, x))(x.array), x
        )
    assert [(row.kind, row.axes, row.payload) for row in found[tr.vmap]] == [
        ("all-reduce", ("model",), 8),
        ("all-reduce", ("data",), 1),
        ("all-reduce", ("model",), 8),
    ]
    assert {row.note for row in found[tr.vmap]} == {"once a turn of a while loop"}
    assert [row.payload for row in found[tr.map]] == [16, 4]  # a gather, and the condition once
    for each in found:
        assert found[each].total() == compiled[each].total()
    assert [(row.axes, row.payload) for row in plain if row.payload == 1] == [(("data",), 1)]


def test_the_larger_branch_counts():
    def program(flag, x):
        one = lambda x: jax.reshard(jnp.sin(jax.reshard(x, P(None, None))), P("data", None))
        two = lambda x: one(one(x))
        return lax.switch(flag, [lambda x: x, two, one], x)

    found = ledger(program, jnp.int32(0), placed((8, 4), "data", None))
    assert found.count() == 2
    assert {row.note for row in found} == {"the largest of 3 branches"}


def test_what_the_compiler_chooses_is_noted():
    shifted = lambda x: lax.pad(x, 0.0, ((-1, 1, 0), (0, 0, 0)))
    for program in (lambda x: x[:4], shifted):
        (row,) = ledger(program, placed((8, 4), "data", None)).rows
        assert row.note == "the compiler chooses"

    def lookup(table, ids):
        return table.at[ids].get(out_sharding=P("data", None))

    table, ids = (
        placed((16, 8), "model", "data"),
        jax.ShapeDtypeStruct((8,), jnp.int32, sharding=NamedSharding(MESH, P("data"))),
    )
    assert {row.note for row in ledger(lookup, table, ids)} == {"the compiler chooses"}


def test_a_callback_is_called_by_the_first_device():
    with jax.set_mesh(MESH):
        x = placed((8, 6), "data", "model")
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)

        def program(x):
            jax.debug.callback(lambda a: None, x)
            return jax.pure_callback(lambda a: a, kind, x) * 2.0

        @tr.shard_map
        def by_hand(x: tr.f32["b/data e/model"]) -> tr.f32["b/data e/model"]:
            jax.debug.callback(lambda a: None, x)
            return x

        assert not len(ledger(by_hand, x))
        found = ledger(program, x)
        compiled = collectives(jax.jit(program).lower(x).compile(), MESH)
    assert [(row.kind, row.note) for row in found] == [
        ("all-gather", "for a callback"),
        ("all-reduce", "of a callback"),
    ]
    assert compare(found, compiled).agrees()


def test_manual_mode_rows():
    x, w = placed((8, 16), "data", None), placed((16, 32), "data", "model")
    rows = short(ledger(manual, x, w))
    assert rows[:3] == [
        ("all-gather", "data", "4 16 -> 16 16 ~data", 1, "forward"),
        ("all-reduce", "model", "2 16 -> 2 16", 1, "forward"),
        ("permute", "data", "2 16 -> 2 16", 1, "forward"),
    ]
    assert [kind for kind, *_ in rows[3:]] == ["all-to-all", "all-to-all", "reduce-scatter", "all-gather", "all-reduce"]


def test_inside_a_region_by_hand_the_other_axis_still_counts():
    """The bytes are those of one device's part along the axis that is left to the types."""
    (row,) = ledger(partly_manual, placed((8, 16), "data", None), placed((16, 32), None, "model")).rows
    assert (row.kind, row.axis, row.payload) == ("all-reduce", "data", 16 * 4)


def test_a_permute_to_itself_moves_nothing():
    def still(x):
        return jax.shard_map(
            lambda x: lax.ppermute(x, "data", [(i, i) for i in range(4)]),
            in_specs=P("data", None), out_specs=P("data", None),
        )(x)  # fmt: skip

    assert len(ledger(still, placed((8, 4), "data", None))) == 0


def test_in_auto_mode_rows_are_estimates():
    """By where the arguments lie, what constraints say, and where a `shard_map` leaves its results."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    found = ledger(lambda x, w: x @ w, placed((8, 4), "data", None, mesh=mesh), placed((4, 4), "data", None, mesh=mesh))
    assert found.auto == ("data", "model")
    (gathered,) = found  # each device has its own rows of the result, and needs all of `w`
    assert (gathered.kind, gathered.axes, gathered.payload) == ("all-gather", ("data",), 64)
    assert gathered.note == "the compiler chooses"
    tail = "the compiler chooses what moves along data, model (auto mode)"
    assert str(found).endswith(f"{tail}; rows are what the program tells it")
    assert str(ledger(jnp.sin, placed((8, 4), "data", None, mesh=mesh))) == tail

    def constrained(x, w):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data", None)))

    args = placed((8, 4), "data", "model", mesh=mesh), placed((4, 4), "model", None, mesh=mesh)
    rows = ledger(constrained, *args)
    assert [(row.kind, row.axes, row.payload) for row in rows] == [("all-reduce", ("model",), 32)]
    compiled = jax.jit(constrained).lower(*args).compile()
    assert compare(rows, collectives(compiled, mesh)).agrees()

    def left(x, w):
        by_hand = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"))
        return constrained(by_hand(x), w)

    rows = ledger(left, *args)
    assert [(row.kind, row.axes, row.payload) for row in rows] == [("all-reduce", ("model",), 32)]


def test_arguments_that_are_not_arrays_are_passed_as_they_are():
    def program(x, how, *, scale):
        return jax.reshard(x, P(None, None)) * scale if how == "whole" else x

    assert ledger(program, placed((8, 4), "data", None), "whole", scale=2.0).count() == 1
    assert ledger(program, placed((8, 4), "data", None), "sliced", scale=2.0).count() == 0


def test_arrays_and_jitted_functions():
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(MESH, P("data", None)))
    assert ledger(jax.jit(lambda x: jnp.sum(x)), x).per_axis() == {"data": 6}


def test_keyword_arguments_have_the_rows_that_they_have_by_position():
    mesh = tr.make_mesh(data=8)
    lies = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def loss(model, batch):
        w = jax.reshard(model["mu"], P(None, None, reduced={"data"}))
        return (jnp.einsum("be,em->bm", batch["x"], w, out_sharding=P("data", None)) ** 2).mean()

    args = {"mu": lies(16, 8)}, {"x": lies(16, 16)}
    rows = ledger(jax.jit(jax.grad(loss)), *args).rows
    moved = [(row.kind, row.role, row.parameter) for row in rows if row.payload > 8]
    assert moved == [("all-gather", "weights", "mu"), ("reduce-scatter", "gradients", "mu")]
    step = lambda model, batch: jax.grad(loss)(model, batch)
    assert ledger(step, batch=args[1], model=args[0]).to_json() == ledger(step, *args).to_json()


def test_a_joint_collective_is_split_over_its_axes():
    found = ledger(lambda x: jax.reshard(x, P(None, None)), placed((64, 4), ("data", "model"), None))
    assert [row.axis for row in found] == ["data,model"]
    assert found.per_axis() == {"data": 768, "model": 128} and found.total() == 896
    assert found.total(axis="data") == found.total(axis="data,model") == found.total(axis="model,data") == 896
    permuted = ledger(lambda x: jax.reshard(x, P(("model", "data"), None)), placed((64, 4), ("data", "model"), None))
    assert permuted.per_axis() == {"data,model": 128}


def test_as_text_and_data():
    found = ledger(gradient(tensor_parallel), *types(BLOCK))
    lines = str(found).splitlines()
    assert lines[0].split() == ["collective", "axis", "of", "bytes", "times", "total", "in", "at"]
    assert "f32[32/data 64/model -> 32 64/model ~data]" in lines[1] and "programs.py:" in lines[1]
    assert lines[-1] == "each device sends 20.0 KiB in 6 collectives: data 12.0 KiB, model 8.00 KiB"
    data = json.loads(found.to_json())
    assert data["total"] == found.total() == sum(row["total"] for row in data["rows"])
    assert data["per_axis"] == found.per_axis()
    assert data["rows"][0]["axes"] == ["data"]


def test_rows_alike_are_one_line():
    row = Row(kind="permute", axes=("x",), what="8", dtype="f32", payload=32, wire=32)
    text = str(Ledger((row, row, row), {"x": 2}))
    assert len(text.splitlines()) == 3 and "96 B" in text


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-gather", 900), ("reduce-scatter", 900), ("all-reduce", 1800), ("all-to-all", 900), ("permute", 1200)],
)
def test_ring_costs(kind, sent):
    assert wire_bytes(kind, 4, 1200) == sent
    assert wire_bytes(kind, 1, 1200) == 0


def test_an_unknown_collective():
    with pytest.raises(ValueError, match="a collective must be one of all-gather, .*, got 'gather'"):
        wire_bytes("gather", 2, 8)


def test_of_two_equal_collectives_by_hand_a_compiler_may_do_one():
    """Each that is written has its row; the second is the first's twin."""
    mesh = tr.make_mesh(d=2, t=4)

    def program(x: f32["b/d n/t"], w: f32["n/t o"]) -> f32["b/d o"]:
        made = tr.einsum("b/d n/t, n/t o -> b/d o +t", x, w)
        return tr.all_reduce("b/d o +t -> b/d o", made) + tr.all_reduce("b/d o +t -> b/d o", made)

    with jax.set_mesh(mesh):
        x, w = (jax.device_put(jnp.ones((8, 8)), jax.P(*axes)) for axes in (("d", "t"), ("t",)))
        fn = jax.jit(tr.shard_map(program))
        found, compiled = ledger(fn, x, w), fn.lower(x, w).compile()
    assert [(row.axis, row.wire, row.twin) for row in found.rows] == [("t", 192, False), ("t", 192, True)]
    assert structure_of(found, compiled.as_text(), mesh).right


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ([(0, 0), (1, 1), (2, 3), (3, 2)], "r,c"),  # Cannon's first step: how far a row goes is told by its number
        ([(0, 1), (1, 0), (2, 3), (3, 2)], "c"),
        ([(0, 2), (1, 3), (2, 0), (3, 1)], "r"),
        ([(0, 3), (1, 2), (2, 1), (3, 0)], "r,c"),
        ([(0, 1)], "r,c"),  # of some devices, as a window sends that reaches over the end of a slice
        ([(2, 3), (3, 2)], "r,c"),
        ([(1, 3)], "r,c"),
    ],
)
def test_a_permute_over_two_axes_is_along_those_that_it_moves_along(pairs, axes):
    mesh = tr.make_mesh(jax.devices()[:4], r=2, c=2)

    def program(x: f32["m/r n/c"]) -> f32["m/r n/c"]:
        return jax.lax.ppermute(x, ("r", "c"), pairs)

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 4)), jax.P("r", "c"))
        fn = jax.jit(tr.shard_map(program))
        found, compiled = ledger(fn, x), fn.lower(x).compile()
    assert [(row.kind, row.axis, row.wire) for row in found.rows] == [("permute", axes, 16)]
    assert structure_of(found, compiled.as_text(), mesh).right
    assert compare(found, collectives(compiled, mesh)).agrees()


def test_thirds_of_two_sums_and_of_one_of_both_agree():
    """A row is whole bytes."""
    mesh = tr.make_mesh(jax.devices()[:3], p=3)

    def program(x: f32["n/p k"]) -> tuple[f32["k"], f32["k"]]:
        return jax.lax.psum(x.sum(0), "p"), jax.lax.psum(jnp.sin(x).sum(0), "p")

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((3, 26)), jax.P("p"))
        fn = jax.jit(tr.shard_map(program))
        found = compare(ledger(fn, x), collectives(fn.lower(x).compile(), mesh))
    assert found.axes == {"p": (276, 277)} and found.agrees()
    assert not dataclasses.replace(found, axes={"p": (276, 280)}).agrees()


@pytest.mark.parametrize(
    "asked, near",
    [
        ({"kind": "allgather"}, "`all-gather`"),
        ({"direction": "forwards"}, "`forward`"),
        ({"axis": "dat"}, "`data`"),
        ({"axis": "data,modl"}, "`model`"),
    ],
)
def test_kinds_axes_and_directions_that_are_none(asked, near):
    with pytest.raises(ValueError, match=f"did you mean {near}"):
        Ledger((), {"data": 2, "model": 4}).total(**asked)
    with pytest.raises(ValueError, match="of direction forward or recomputed or backward, got 'update'"):
        Ledger(()).select(direction="update")  # an optimizer's rows are forward


def test_a_mapped_lookups_gradient_stays_where_its_rows_are():
    """Each device adds to what it holds of the names that lookups are mapped over: nothing moves, and nothing did."""
    with tr.Layout(tr.make_mesh(data=4, model=2), compute={"b": "data", "p": "model"}):
        x = tr.shard(tr.ones({"b": 8, "p": 4, "e": 6}), "compute")
        ids = tr.shard(tr.zeros({"b": 8, "p": 4, "k": 2}, np.int32), "compute")
        gradient = jax.jit(tr.grad(lambda x: tr.vmap(lambda x, ids: tr.take_along(x, "e", ids), "b")(x, ids).sum()))
        assert not ledger(gradient, x).rows
        assert not re.findall(r"all-\w+\(|collective-\w+\(", gradient.lower(x).compile().as_text())


def test_what_is_flattened_inside_of_auto_axes_is_still_in_slices():
    """Of the first of joined dimensions slices stay slices, whose sum is one over devices; others are gathered."""
    total = lambda x: jax.sharding.auto_axes(lambda x: jnp.vdot(x, x), out_sharding=P())(x)
    with jax.set_mesh(tr.make_mesh(data=4, model=2)):
        x = jnp.ones((8, 16))
        (row,) = ledger(total, jax.reshard(x, P("data", None)))
        assert (row.kind, row.axes) == ("all-reduce", ("data",))
        assert {(row.kind, row.axes) for row in ledger(total, jax.reshard(x, P(None, "model")))} == {
            ("all-gather", ("model",))
        }


def test_functions_that_compilers_write_as_loops_say_when_they_end():
    """Each of the two loops of an incomplete gamma function goes on while one element on any device changes.

    Compiled where the compiler places arrays: JAX 0.12.0 cannot lower the function where its types do.
    """
    run = lambda x: jax.scipy.special.gammainc(x, x)
    mesh = tr.make_mesh(data=4, model=2)
    with jax.set_mesh(mesh):
        x = jax.reshard(jnp.ones((8, 16)), P("data", None))
        said = ledger(run, x)
    by_compiler = tr.make_mesh(data=4, model=2, axis_type="auto")
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(by_compiler, P("data", None)))
    found = collectives(jax.jit(run).lower(x).compile(), by_compiler)
    assert [(row.kind, row.axes, row.total) for row in said] == [("all-reduce", ("data",), 1)] * 2
    assert sum(row.total for row in found) == 2
