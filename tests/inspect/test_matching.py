"""Of arrays that could be those of several rows, each row gets what leaves none over."""

import dataclasses
import re

import jax
import jax.numpy as jnp

import trellis as tr
from tests.inspect.test_structure import PROGRAM, ROWS, found
from trellis.inspect import ledger, structure_of


def sums(*shapes):
    """The program with more sums, each a shape and its groups."""
    lines = "".join(
        f"  %part.{n} = f32[{shape}] parameter({n + 1})\n"
        f"  %more.{n} = f32[{shape}] all-reduce(%part.{n}), replica_groups={groups}, to_apply=%sum\n"
        for n, (shape, groups) in enumerate(shapes)
    )
    return PROGRAM.replace("  %all-reduce.1", f"{lines}  %all-reduce.1")


def test_a_sum_that_is_done_along_one_axis_after_the_other_is_not_that_of_another_row():
    """Eight numbers, summed twice, are as many as the sixteen of the other sum: not those, stacked after a loop."""
    everywhere, over_model, over_data = "{{0,1,2,3}}", "{{0,1},{2,3}}", "{{0,2},{1,3}}"
    of_eight = [("8", over_model), ("8", over_data)] * 2
    turns = dataclasses.replace(ROWS[0], axes=("data", "model"), payload=32, times=2)
    scattered = dataclasses.replace(ROWS[0], kind="reduce-scatter", axes=("data", "model"), payload=64)
    assert found(sums(("16", everywhere), *of_eight), (*ROWS, turns, scattered)).right
    assert found(sums(("16", everywhere)), (*ROWS, turns)).right  # stacked, and done after a loop
    assert not found(sums(("16", everywhere)), (*ROWS, turns, scattered)).right


def test_two_gathers_may_be_one():
    text = PROGRAM.replace("f32[16,16]{1,0} all-gather", "f32[32,16]{1,0} all-gather").replace(
        "{{0,2},{1,3}}, dimensions", "{{0,2,1,3}}, dimensions"
    )
    first = dataclasses.replace(ROWS[1], what="rows/model/data embed -> rows embed")
    second = dataclasses.replace(first, axes=("model",), payload=2048, wire=1024)
    assert found(text, (ROWS[0], first, second)).right
    assert not found(text, (ROWS[0], first, dataclasses.replace(second, payload=4096))).right
    gather = re.search(r"%all-gather.1 (.*)", text)[1]
    of_two = text.replace("  %all-reduce.1", f"  %other {gather}\n  %all-reduce.1".replace("%all-reduce.1)", "%x)"))
    assert found(of_two, (ROWS[0], first, second, first, second)).right
    assert not found(of_two, (ROWS[0], *(first, second) * 3)).right


def test_two_gathers_may_be_one_if_an_equal_one_does_the_first_too():
    text = PROGRAM.replace("  %all-reduce.1", "  %again = f32[32,16]{1,0} all-gather(%all-reduce.1), channel_id=4, "
                           "replica_groups={{0,2,1,3}}, dimensions={0}\n  %all-reduce.1")  # fmt: skip
    second = dataclasses.replace(ROWS[1], axes=("model",), payload=2048, wire=1024)
    assert found(text, (*ROWS, ROWS[1], second)).right
    assert not found(text, (*ROWS, dataclasses.replace(second, payload=4096))).right


def test_a_sum_of_what_no_turn_of_a_loop_changes_may_be_done_once():
    mesh = tr.make_mesh(data=4, model=2)
    layout = tr.Layout(mesh, params={"embed": "data", "mlp": "model"}, compute={"batch": "data", "mlp": "model"})

    def loss(w, x):
        add = lambda d, _: (d + tr.einsum("batch embed, embed mlp -> batch mlp", x, w).sum("mlp"), None)
        total, _ = tr.scan(add, tr.Axis("turn", 6))(x.sum("embed"), None)
        return (total * total).sum().array

    with layout:
        x = tr.shard(tr.named(jnp.ones((8, 16)), "batch embed"), "compute")
        w = tr.shard(tr.named(jnp.ones((16, 32)), "embed mlp"))
        rows = ledger(jax.grad(loss), w, x)
        compiled = jax.jit(jax.grad(loss)).lower(w, x).compile()
    (scatter,) = (row for row in rows.rows if row.kind == "reduce-scatter")
    assert (scatter.times, scatter.same) == (6, 6)
    assert structure_of(rows, compiled, mesh).right
    assert not structure_of(
        dataclasses.replace(rows, rows=tuple(dataclasses.replace(row, same=1) for row in rows.rows)), compiled, mesh
    ).right


def test_a_sum_of_what_is_gathered_too_may_be_of_what_that_brings():
    """A batch's mask, which the loss reads whole: the compiler of a loop over microbatches adds that up."""
    layout = tr.Layout(tr.make_mesh(data=4, model=2), compute={"batch": "data", "pos": "model"})

    def mean(x, mask):
        layer = lambda x, _: (x * mask / mask.astype("float32").sum("pos"), None)
        x, _ = tr.scan(layer, tr.Axis("layers", 2))(x, None)
        return (x.sum("pos").array * jnp.max(tr.reshard("batch/data pos/model -> batch/data pos", mask.array))).sum()

    with layout:
        x, mask = (tr.shard(tr.ones({"batch": 8, "pos": 16}), "compute") for _ in range(2))
        sums = [row for row in ledger(mean, x, mask) if row.axes == ("model",) and row.kind == "all-reduce"]
    assert [(row.times, row.gathered) for row in sums] == [(2, True), (1, False)]
    without = PROGRAM.replace("all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum", "copy(%x)")
    matched = found(without, (dataclasses.replace(ROWS[0], gathered=True), ROWS[1]))
    assert matched.right and "1 of them as a sum of what is gathered" in str(matched)
    assert not found(without).right


def test_numbers_of_four_bits_may_move_as_bytes():
    """Compilers for GPUs gather two of them as one number of a byte, those for CPUs as a wider one each."""
    four = dataclasses.replace(ROWS[1], dtype="f4_e2m1fn", payload=128, wire=64)
    for made in ("u8[8,16]", "f16[16,16]", "f4e2m1fn[16,16]"):
        gather = f"  %more = {made} all-gather(%all-reduce.1), replica_groups={{{{0,2}},{{1,3}}}}, dimensions={{0}}\n"
        text = PROGRAM.replace("  ROOT", f"{gather}  ROOT")
        assert found(text, (*ROWS, four)).right and found(text).besides and not found(text, (*ROWS, four)).besides
        assert not found(text, (*ROWS, dataclasses.replace(four, payload=256, wire=128))).right
