"""Rows of a ledger are matched with the collectives of compiled programs, and mistakes in these are found."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import trellis as tr
from tests.proof.mutations import ELSEWHERE, mutations
from trellis.checkpoints.checkpoints import LastGood
from trellis.inspect import Ledger, Row, collectives, ledger, structure_of
from trellis.inspect.copies import Apart
from trellis.inspect.groups import axes_of
from trellis.program.pairs import axes_of_pairs
from trellis.recipes.load import load_run
from trellis.run.config import GuardRule
from trellis.train.assemble import assemble
from trellis.train.stopping import ProgramDiffers
from trellis.train.structure import StructureCheck
from trellis.train.summary import arrays

MESH = AbstractMesh((2, 2), ("data", "model"))


@pytest.mark.slow
def test_mistakes_in_a_step_are_found():
    """All of them; in sums of numbers where arguments say how they are sliced, as programs of JAX 0.12 do not."""
    options = {"batch_size": "16", "mesh.data": "4", "mesh.model": "2", "layout.preset": "fsdp_tensor_sequence"}
    assembled = assemble(load_run("tiny", options), jax.devices())
    with assembled.layout:
        args = (assembled.abstract, assembled.abstract_batch())
        text = assembled.step.lower(*args).compile().as_text()
        rows = ledger(assembled.step, *args)
    right = structure_of(rows, text, assembled.layout.mesh)
    assert right.right and len(right.matches) == len(rows) > 50, str(right)
    sums = [part.elements for part, _ in right.besides if part.collective.kind != "all-gather"]
    assert set(sums) <= {1}  # JAX 0.12's XLA gathers positions once more than it is asked to
    kinds, missed = set(), []
    for kind, wrong in mutations(text, np.random.default_rng(0), 40):
        changed = " ".join(set(wrong.split("\n")) - set(text.split("\n")))
        if kind in ELSEWHERE or kind == "a maximum taken twice":
            continue
        if not structure_of(rows, wrong, assembled.layout.mesh).right:
            kinds.add(kind)
        elif "sharding={" in text or not re.search(r"= \(?f32\[\][,)]? ", changed):
            missed.append(f"{kind}: {changed:.300}")
    assert not missed, "\n".join(missed)
    assert {"a sum left out", "a sum taken twice", "a maximum for a sum", "members of two groups swapped"} <= kinds


@pytest.mark.slow
def test_stages_count_tokens_of_their_own():
    """A mixture's load-balancing loss divides by how many tokens a stage's part of the batch has."""
    options = {"model.family": "mixtral", "model.experts": "4", "model.experts_per_token": "2", "mesh.stage": "2",
               "mesh.data": "2", "batch_size": "8", "model.layers": "2"}  # fmt: skip
    assembled = assemble(load_run("tiny", options), jax.devices()[:4])
    with assembled.layout:
        args = (assembled.abstract, assembled.abstract_batch())
        text = assembled.step.lower(*args).compile().as_text()
        found = structure_of(ledger(assembled.step, *args), text, assembled.layout.mesh)
    assert found.right and found.matches, str(found)


PROGRAM = """HloModule jit_f, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8,16]) -> f32[32,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %all-reduce.1 = f32[8,16]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum
  ROOT %all-gather.1 = f32[16,16]{1,0} all-gather(%all-reduce.1), channel_id=2, replica_groups={{0,2},{1,3}}, dimensions={0}
}
"""  # noqa: E501
ROWS = (
    Row(kind="all-reduce", axes=("model",), what="rows embed +model -> rows embed", dtype="f32", payload=512, wire=512,
        source="train.py:3 (f)"),
    Row(kind="all-gather", axes=("data",), what="rows/data embed -> rows embed", dtype="f32", payload=1024, wire=512,
        source="train.py:4 (f)"),
)  # fmt: skip


def found(text, rows=ROWS):
    return structure_of(Ledger(rows, dict(MESH.shape)), text, MESH)


def test_a_program_that_is_as_written():
    assert found(PROGRAM).right
    assert str(found(PROGRAM)) == "2 of 2 rows of the ledger are in the 2 collectives of the compiled program"
    besides = found(PROGRAM, ROWS[:1])
    assert besides.right and besides.line.endswith("; besides them 1 x all-gather of 256 elements over data")


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum", "copy(%x)",
         "missing: all-reduce over model of f32[rows embed +model -> rows embed], at train.py:3 (f)"),
        ("channel_id=1, replica_groups={{0,1},{2,3}}", "channel_id=1, replica_groups={{0,2},{1,3}}",
         "missing: all-reduce over model of f32[rows embed +model -> rows embed], at train.py:3 (f)"),
        ("channel_id=1, replica_groups={{0,1},{2,3}}", "channel_id=1, replica_groups={{0,3},{1,2}}",
         "not along mesh axes: all-reduce in groups {0,3} {1,2} of 128 elements, at all-reduce.1"),
        ("channel_id=2, replica_groups={{0,2},{1,3}}", "channel_id=2, replica_groups={{2,0},{3,1}}",
         "not along mesh axes: all-gather in groups {2,0} {3,1} of 256 elements, at all-gather.1"),
        ("f32[16,16]{1,0} all-gather(%all-reduce.1)", "f32[8,16]{1,0} all-reduce(%all-reduce.1)",
         "missing: all-gather over data of f32[rows/data embed -> rows embed], at train.py:4 (f)"),
        ("%all-reduce.1 = f32[8,16]{1,0} all-reduce(%x), ", "%first = f32[8,16]{1,0} all-reduce(%x), channel_id=3, "
         "replica_groups={{0,1},{2,3}}, to_apply=%sum\n  %all-reduce.1 = f32[8,16]{1,0} all-reduce(%first), ",
         "summed twice: all-reduce over model of 128 elements, at all-reduce.1"),
        ("%all-reduce.1 = f32[8,16]{1,0} all-reduce(%x), ", "%first = f32[8,16]{1,0} all-reduce(%x), channel_id=3, "
         "replica_groups={{0,1},{2,3}}, to_apply=%sum\n  %fenced = f32[8,16]{1,0} opt-barrier(%first)\n"
         "  %all-reduce.1 = f32[8,16]{1,0} all-reduce(%fenced), ",
         "summed twice: all-reduce over model of 128 elements, at all-reduce.1"),
        ("f32[] add(%a, %b)", "f32[] maximum(%a, %b)",
         "not asked for: all-reduce over model of the maximum of 128 elements, at all-reduce.1"),
    ],
    ids=["dropped", "other axis", "swapped", "reversed", "other kind", "twice", "behind a fence", "maximum"],
)  # fmt: skip
def test_mistakes_and_their_words(before, after, fault):
    assert PROGRAM.count(before) == 1
    wrong = found(PROGRAM.replace(before, after))
    assert not wrong.right
    assert fault in wrong.faults and fault in str(wrong)


def test_a_maximum_is_no_sum():
    text = PROGRAM.replace("f32[] add(%a, %b)", "f32[] maximum(%a, %b)")
    largest = dataclasses.replace(ROWS[0], reduction="maximum")
    assert found(text, (largest, ROWS[1])).right
    assert not found(PROGRAM, (largest, ROWS[1])).right
    # One axis after another: what the row takes over both; nothing is known to be wrong of what is beside it.
    both = dataclasses.replace(largest, axes=("data", "model"))
    assert not found(text, (both, ROWS[1])).extremes and found(text, (ROWS[1],)).extremes
    # In the place of a sum that runs as often as some condition has it, where another row takes a maximum.
    unsure = dataclasses.replace(ROWS[0], note="at most 8 times")
    assert found(text, (both, unsure, ROWS[1])).extremes and not found(text, (largest, unsure, ROWS[1])).extremes


def test_a_loop_may_leave_a_sum_until_after_its_last_turn_and_not_out():
    summed, gathered = dataclasses.replace(ROWS[0], times=4), ROWS[1]
    assert found(PROGRAM, (summed, gathered)).right
    assert not found(PROGRAM, (summed, summed, gathered)).right


def test_turns_of_a_loop_may_add_to_one_place_of_what_is_summed_after_it():
    """Six ticks of a pipeline read four microbatches, whose gradients are summed once after the last tick."""
    ticks = dataclasses.replace(ROWS[0], payload=ROWS[0].payload // 4, times=6)
    assert found(PROGRAM, (ticks, ROWS[1])).right
    assert not found(PROGRAM, (dataclasses.replace(ticks, times=3), dataclasses.replace(ticks, times=2), ROWS[1])).right


def test_stacked_sums_of_a_loop_may_be_scattered():
    text = PROGRAM.replace(
        "%all-gather.1 = f32[16,16]{1,0} all-gather(%all-reduce.1), channel_id=2, replica_groups={{0,2},{1,3}}",
        "%scattered = f32[4,16]{1,0} reduce-scatter(%all-reduce.1), replica_groups={{0,2},{1,3}}, to_apply=%sum",
    )
    row = dataclasses.replace(ROWS[0], axes=("data",), payload=64, times=8)
    assert found(text, (ROWS[0], row)).right
    assert not found(text, (ROWS[0], dataclasses.replace(row, times=7))).right


def test_a_scatter_may_give_slices_in_another_order():
    """A reduce-scatter over two axes and a permute of its slices are one sum, of which each device cuts its own out."""
    text = PROGRAM.replace("replica_groups={{0,1},{2,3}}, to_apply", "replica_groups={{0,1,2,3}}, to_apply")
    first = dataclasses.replace(ROWS[0], kind="reduce-scatter", axes=("data", "model"))
    second = dataclasses.replace(first, kind="permute", payload=128)
    assert found(text, (first, second, ROWS[1])).right
    assert found(text, (first, dataclasses.replace(second, axes=("model",)), ROWS[1])).right  # along some of them
    assert not found(text, (first, dataclasses.replace(second, what="other"), ROWS[1])).right
    assert len(found(PROGRAM, (first, second, ROWS[1])).missing) == 2


def test_a_sum_that_is_sliced_next_may_be_scattered_first():
    """Scattered over one mesh axis, slices are summed over the other: half of what one sum over both would move."""
    first = "%first = f32[8,16]{1,0} reduce-scatter(%whole), replica_groups={{0,2},{1,3}}, to_apply=%sum"
    whole = "%whole = f32[16,16]{1,0} parameter(1)"
    text = PROGRAM.replace("  %all-reduce.1", f"  {whole}\n  {first}\n  %all-reduce.1").replace("(%x)", "(%first)")
    row = dataclasses.replace(ROWS[0], axes=("data", "model"), payload=1024)
    assert found(text, (row, ROWS[1])).right
    assert not found(text.replace("reduce-scatter(%whole), replica_groups={{0,2},{1,3}}", "copy(%whole)"), (row,)).right
    assert not found(text, (row, ROWS[0], ROWS[1])).right, "the second sum is of the slices"


def test_stacked_sums_are_left_to_the_loop_that_stacks_them():
    """A gather that is done as a sum, of as many elements as the sum of each turn."""
    more = "%zeros = f32[2,16]{1,0} all-reduce(%part), replica_groups={{0,1},{2,3}}, to_apply=%sum"
    text = PROGRAM.replace("  %all-reduce.1", f"  %part = f32[2,16]{{1,0}} parameter(1)\n  {more}\n  %all-reduce.1")
    turns = dataclasses.replace(ROWS[0], payload=128, times=4)
    gathered = dataclasses.replace(ROWS[1], axes=("model",), payload=128, wire=64)
    assert found(text, (turns, gathered, ROWS[1])).right
    assert not found(text, (turns, gathered, gathered, ROWS[1])).right


def test_of_equal_sums_each_row_gets_the_one_that_leaves_none_over():
    """The sum in the loop is a gather's; the row that is summed as often is stacked, and done after the loop."""
    loop = """
%body (turn: f32[2,16]) -> f32[2,16] {
  %turn = f32[2,16]{1,0} parameter(0)
  ROOT %zeros = f32[2,16]{1,0} all-reduce(%turn), replica_groups={{0,1},{2,3}}, to_apply=%sum
}

%going (turn: f32[2,16]) -> pred[] {
  %turn = f32[2,16]{1,0} parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY"""
    times = 'condition=%going, body=%body, backend_config={"known_trip_count":{"n":"4"}}'
    inside = f"  %part = f32[2,16]{{1,0}} parameter(1)\n  %loop = f32[2,16]{{1,0}} while(%part), {times}\n"
    text = PROGRAM.replace("\nENTRY", loop, 1).replace("  %all-reduce.1", f"{inside}  %all-reduce.1")
    turns = dataclasses.replace(ROWS[0], payload=128, times=4)
    gathered = dataclasses.replace(ROWS[1], axes=("model",), payload=128, wire=64, times=4)
    assert found(text, (turns, gathered, ROWS[1])).right
    assert not found(text, (turns, turns, gathered, ROWS[1])).right


def test_an_array_may_be_padded_and_not_cut():
    row = dataclasses.replace(ROWS[0], payload=480)
    assert found(PROGRAM, (row, ROWS[1])).right
    assert not found(PROGRAM, (dataclasses.replace(row, payload=544), ROWS[1])).right


def test_an_array_may_be_padded_as_the_program_shows():
    """Each device's part begins where its tiles do: by a third for 96 of 128 rows, which are not 95."""
    pad = "f32[8,16]{1,0} pad(%x, %zero), padding=0_2x0_0"
    text = PROGRAM.replace("%x = f32[8,16]", "%zero = f32[] constant(0)\n  %x = f32[6,16]")
    text = text.replace("  %all-reduce.1", f"  %padded = {pad}\n  %all-reduce.1").replace(
        "reduce(%x)", "reduce(%padded)"
    )
    row = dataclasses.replace(ROWS[0], payload=384)
    assert found(text, (row, ROWS[1])).right
    assert not found(PROGRAM, (row, ROWS[1])).right
    assert not found(text, (dataclasses.replace(row, payload=380), ROWS[1])).right
    assert not found(text, (row, row, ROWS[1])).right
    sliced = "f32[8,16]{1,0} reduce-scatter(%padded), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum"
    assert found(re.sub(r"f32\[8,16\]\{1,0\} all-reduce\(%padded.*", sliced, text), (row, ROWS[1])).right
    both = re.sub(r"all-reduce.1 = .*reduce\(%padded\)", "all-reduce.1 = (f32[8,16]{1,0}, f32[8,16]{1,0}) "
                  "all-reduce(%padded, %padded)", text)  # fmt: skip
    assert found(both, (row, row, ROWS[1])).right and not found(both, (row, row, row, ROWS[1])).right


def test_what_is_added_may_be_summed_as_one():
    """The gradient of a norm that is used twice: devices may add before they sum, as TPUs' compiler makes them."""
    first = dataclasses.replace(ROWS[0], added=7)
    assert found(PROGRAM, (first, dataclasses.replace(first, what="one rows embed +model -> ..."), ROWS[1])).right
    assert not found(PROGRAM, (first, dataclasses.replace(first, added=8), ROWS[1])).right
    assert not found(PROGRAM, (first, dataclasses.replace(first, payload=64), ROWS[1])).right
    assert len(found(PROGRAM.replace("all-reduce(%x)", "copy(%x)"), (first, first, ROWS[1])).missing) == 2
    # Scattered in another order, by a permute or by the one sum of which each device cuts its own out.
    text = PROGRAM.replace("replica_groups={{0,1},{2,3}}, to_apply", "replica_groups={{0,1,2,3}}, to_apply")
    scattered = dataclasses.replace(first, kind="reduce-scatter", axes=("data", "model"))
    permuted = dataclasses.replace(first, kind="permute", axes=("data", "model"), payload=128)
    assert found(text, (scattered, permuted) * 2 + (ROWS[1],)).right
    # The other sum is a gather's, which would have none if each of the rows took one.
    zeros = "%zeros = f32[8,16]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%sum"
    text = PROGRAM.replace("  %all-reduce.1", f"  {zeros}\n  %all-reduce.1")
    gather = dataclasses.replace(ROWS[1], axes=("model",), payload=512, wire=256)
    assert found(text, (first, first, gather, ROWS[1])).right
    assert not found(text, (first, first, gather, gather, ROWS[1])).right


def test_rows_say_what_is_added_to_what():
    layout = tr.Layout(tr.make_mesh(data=8), params={"embed": "data"}, compute={"batch": "data"})
    scale = tr.ones({"embed": 64})
    with layout:
        x = tr.shard(tr.ones({"batch": 8, "embed": 64}), "compute")
        uses = lambda scale, x: (tr.tanh(x * scale) * scale).sum().array
        rows = [row for row in ledger(jax.grad(uses), tr.shard(scale), x) if row.kind == "reduce-scatter"]
        assert len(rows) == 2 and rows[0].added == rows[1].added > 0
        single, product = tr.shard(tr.ones({"one": 1, "embed": 64})), "batch embed, one embed -> batch embed"
        shapes = lambda scale, x: tr.sin(x * scale.sum("one")) + tr.sin(tr.einsum(product, x, scale))
        of_one = ledger(jax.grad(lambda *given: shapes(*given).sum().array), single, x)
        rows = [row for row in of_one if row.kind == "all-reduce"]
        assert len(rows) == 2 and rows[0].added == rows[1].added > 0
        apart = lambda both, x: uses(both[0], x) + uses(both[1], x)
        rows = [row for row in ledger(jax.grad(apart), (tr.shard(scale),) * 2, x) if row.kind == "reduce-scatter"]
        assert len(rows) == 4 and len({row.added for row in rows}) == 2


def test_each_weight_of_a_pass_has_a_gather_of_its_own():
    again = [dataclasses.replace(ROWS[1], role="weights", direction=pass_) for pass_ in ("forward", "recomputed")]
    assert found(PROGRAM, (ROWS[0], *again)).right
    assert not found(PROGRAM, (ROWS[0], *again, again[0])).right


def test_weights_may_be_gathered_once_before_a_loop():
    rows = [dataclasses.replace(ROWS[1], role="weights", direction="forward", times=2, same=2) for _ in range(2)]
    gather = "f32[16,16]{1,0} all-gather(%all-reduce.1), channel_id=4, replica_groups={{0,2},{1,3}}, dimensions={0}"
    second = PROGRAM.replace("  ROOT %all-gather.1", f"  %first = {gather}\n  ROOT %all-gather.1")
    assert found(second, (ROWS[0], *rows)).right
    assert not found(second, (ROWS[0], *rows, rows[0])).right
    assert not found(second, (ROWS[0], *(dataclasses.replace(row, same=1) for row in rows))).right  # one a layer


def test_what_the_types_do_not_decide_is_no_fault():
    chosen = found(PROGRAM, (*ROWS, dataclasses.replace(ROWS[0], payload=64, note="the compiler chooses")))
    assert chosen.right and not chosen.missing and len(chosen.open) == 1
    assert chosen.line.startswith("2 of 3 rows") and chosen.line.endswith("; the compiler chose otherwise for 1")


def test_each_branch_may_take_a_maximum_of_its_own():
    mesh = tr.make_mesh(jax.devices()[:4], data=4)
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, jax.P("data")))
    choose = lambda x, i: jax.lax.switch(i, [jnp.sum, jnp.max, jnp.min], x)
    with jax.set_mesh(mesh):
        told, text = ledger(choose, x, jnp.int32(1)), jax.jit(choose).lower(x, jnp.int32(1)).compile().as_text()
    assert len(told) == 1 and structure_of(told, text, mesh).right
    assert not structure_of(dataclasses.replace(told, instead=told.instead[:1]), text, mesh).right


def test_a_callback_that_moves_nothing_is_not_said_to_be_found():
    mesh = tr.make_mesh(jax.devices()[:4], data=4)
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, jax.P()))
    function = lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((8,), jnp.float32), x)
    with jax.set_mesh(mesh):
        matched = structure_of(ledger(function, x), jax.jit(function).lower(x).compile(), mesh)
    assert matched.right and matched.line.startswith("0 of 1 rows") and matched.line.endswith("otherwise for 1")


def test_a_while_loop_runs_unknown_times_and_what_it_moves_has_to_be_there():
    turns = [dataclasses.replace(row, note="once a turn of a while loop") for row in ROWS]
    assert found(PROGRAM, turns).right
    assert not found(PROGRAM, (*turns, dataclasses.replace(turns[0], payload=64))).right


def test_permutes_go_along_axes():
    mesh = {"data": 2, "model": 2}
    assert axes_of_pairs([(0, 1), (2, 3)], mesh) == ("model",)
    assert axes_of_pairs([(0, 1), (3, 2)], mesh) == ()
    assert axes_of_pairs([(0, 1), (1, 0), (2, 3), (3, 0)], mesh) == ()
    assert axes_of_pairs([(0, 2), (1, 3)], mesh) == ("data",)
    assert axes_of_pairs([(n, n) for n in range(4)], mesh, some=True) == ()
    assert axes_of_pairs([(0, 0), (1, 1), (2, 3), (3, 2)], mesh) == ("data", "model")


def test_a_permute_may_send_any_of_several_copies():
    """Which of the devices along the third axis a slice comes from is the compiler's affair."""
    mesh = tr.make_mesh(jax.devices()[:8], x=2, y=2, z=2)
    with jax.set_mesh(mesh):
        x = jax.reshard(jnp.ones((8, 4)), jax.P("z"))
        move = lambda x: jnp.sin(tr.reshard("batch/z embed -> batch/x embed", x))
        text = jax.jit(move).lower(x).compile().as_text()
        assert structure_of(ledger(move, x), text, mesh).right
        pairs = re.search(r"source_target_pairs=(\{\{.*?\}\})", text)[1]
        other = "{{0,0},{1,6},{2,1},{3,7},{4,2},{5,4},{6,3},{7,5}}"  # along x, y and z
        assert axes_of_pairs([(0, 0), (1, 6), (2, 1), (3, 7), (4, 2), (5, 4), (6, 3), (7, 5)], mesh.shape) == (
            "x",
            "y",
            "z",
        )
        assert structure_of(ledger(move, x), text.replace(pairs, other), mesh).right


def test_groups_hold_each_device_once():
    assert axes_of([(0, 1)], {"data": 2, "model": 2}) == ()
    assert axes_of([(0, 1), (1, 2)], {"data": 2, "model": 2}) == ()
    assert axes_of([(0, 2, 1, 3)], {"data": 2, "model": 2}, ordered=True) == ("data", "model")
    assert axes_of([(0, 1), (2, 3), (4, 5), (6, 7)], {"data": 2, "model": 4}) == ("model",)  # halves of `model`


def test_a_run_tells_a_fault_and_keeps_the_program(tmp_path):
    batch = SimpleNamespace(tokens=np.zeros((8, 4)))
    run = SimpleNamespace(guard=GuardRule())
    assembled = SimpleNamespace(layout=SimpleNamespace(mesh=MESH), abstract_batch=lambda step: batch, run=run)
    assembled.at = lambda step: assembled  # one length of the sequences
    check = StructureCheck(assembled, Ledger(ROWS, dict(MESH.shape)), tmp_path)
    last_good = lambda: LastGood("last good checkpoint: here", "run the same command again")
    told = check(PROGRAM, 0, last_good)
    assert told.startswith("matched  2 of 2 rows of the ledger are in the 2 collectives of the compiled program (")
    assert check.found[0]["right"] and not (tmp_path / "compiled.hlo").exists()

    rule, kept = (
        "A compiled step must move what its types say, between the devices along their mesh axes.",
        "compiled.hlo",
    )
    other = PROGRAM.replace("channel_id=1, replica_groups={{0,1},{2,3}}", "channel_id=1, replica_groups={{0,2},{1,3}}")
    told = check(other, 0, last_good)
    assert told.startswith(f"WARNING: {rule}\n  seen:  missing: all-reduce over model of ")
    assert f"\n  where: {tmp_path / kept}\n  fix:   compare its numbers with one device (trellis prove" in told
    assert (tmp_path / kept).read_text() == other

    wrong = PROGRAM.replace("replica_groups={{0,1},{2,3}}", "replica_groups={{0,3},{1,2}}")
    with pytest.raises(ProgramDiffers) as error:
        check(wrong, 0, last_good)
    assert error.value.exit_code == 3 and error.value.rule == rule
    assert "not along mesh axes: all-reduce in groups {0,3} {1,2}" in error.value.seen
    assert error.value.where == f"{tmp_path / kept}; last good checkpoint: here"
    assert (tmp_path / kept).read_text() == wrong
    assert not check.found[2]["right"] and len(check.found[2]["faults"]) == 2
    assert "not along mesh axes: " in (tmp_path / "ledger.txt").read_text()
    run.guard = GuardRule(structure=False)
    assert check(wrong, 0, last_good).startswith(f"WARNING: {rule}\n")
    assert "a compiled program's text must have an ENTRY computation" in check("HloModule nothing", 0, last_good)


def test_rows_say_which_parameter_they_move():
    """Through a loop over layers, casts, clipping and the moments of the optimizer."""
    options = {
        "mesh.data": "4",
        "mesh.model": "2",
        "layout.preset": "fsdp_tensor",
        "microbatches": "2",
        "batch_size": "16",
    }
    assembled = assemble(load_run("tiny", options), jax.devices())
    with assembled.layout:
        rows = ledger(assembled.step, assembled.abstract, assembled.abstract_batch())
    moved = {}
    for row in rows:
        if row.parameter and row.axes == ("data",):
            moved.setdefault(row.parameter, []).append((row.kind, row.role))
    parameters = {a["name"] for a in arrays(assembled)}
    assert {name.removeprefix("model.") for name in moved} == parameters and len(parameters) > 9
    for found in moved.values():
        assert set(found) == {("all-gather", "weights"), ("reduce-scatter", "gradients")}


def test_in_auto_mode_groups_are_the_compilers_own():
    """Parts of an axis, one after the other, are the axis; over axes in explicit mode such groups are a fault."""
    one = "all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum"
    halves = "%half = f32[8,16]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum"
    rest = "all-reduce(%half), channel_id=3, replica_groups={{0,2},{1,3}}, to_apply=%sum"
    assert PROGRAM.count(f"%all-reduce.1 = f32[8,16]{{1,0}} {one}") == 1
    text = PROGRAM.replace(
        f"  %all-reduce.1 = f32[8,16]{{1,0}} {one}", f"  {halves}\n  %all-reduce.1 = f32[8,16]{{1,0}} {rest}"
    )
    mesh = AbstractMesh((4,), ("data",))
    assert structure_of(Ledger((), {"data": 4}, auto=("data",)), text, mesh).right
    explicit = structure_of(Ledger((), {"data": 4}), text, mesh)
    assert not explicit.twice and {part.collective.name for part in explicit.strange} == {
        "half",
        "all-reduce.1",
        "all-gather.1",
    }
    again = text.replace("channel_id=3, replica_groups={{0,2},{1,3}}", "channel_id=3, replica_groups={{0,1},{2,3}}")
    assert structure_of(Ledger((), {"data": 4}, auto=("data",)), again, mesh).twice


def test_which_faults_are_certain():
    """Copies along axes in auto mode may be made in ways that are not followed, a missing row be done in others, and a
    maximum may be taken for the compiler's own use."""
    apart = Apart("a parameter", ("model",), "")
    empty = found(PROGRAM)
    assert not empty.certain and not found(PROGRAM, (*ROWS, *ROWS)).certain
    largest = found(PROGRAM.replace("f32[] add(%a, %b)", "f32[] maximum(%a, %b)"), (ROWS[1],))
    assert largest.extremes and not largest.right and not largest.certain
    assert dataclasses.replace(empty, apart=(apart,)).certain
    assert not dataclasses.replace(empty, apart=(apart,), auto=("data", "model")).certain


def _of_what_is_closed_over(a):
    return a * jax.reshard(jax.reshard(jnp.full((8, 8), 2.0) * 3.0, jax.P("x")), jax.P()).sum()


def _of_an_argument(a):
    return a * jax.reshard(a, jax.P()).sum()


@pytest.mark.parametrize(("function", "rows", "missing"), [(_of_what_is_closed_over, 0, 0), (_of_an_argument, 1, 1)])
def test_what_a_compiler_may_know_beforehand_need_not_be_moved(function, rows, missing):
    """XLA writes the gathered constant down, and a proof of such a program said that a gather was missing."""
    mesh = tr.make_mesh(x=8)
    a = jax.device_put(jnp.ones(64), jax.NamedSharding(mesh, jax.P("x")))
    with jax.set_mesh(mesh):
        listed, compiled = ledger(function, a), jax.jit(function).lower(a).compile()
        nothing_moves = jax.jit(lambda a: a * 2).lower(a).compile()
    assert len(listed) == 1
    assert structure_of(listed, compiled, mesh).right
    assert len(structure_of(listed, compiled, mesh).matches) == rows
    assert len(structure_of(listed, nothing_moves, mesh).missing) == missing


@pytest.mark.parametrize("kind, words", [("threefry2x32", 2), ("rbg", 4)])
def test_random_keys_move_as_their_words(kind, words):
    mesh = tr.make_mesh(jax.devices()[:4], data=4)
    keys = jax.random.split(jax.random.key(0, impl=kind), 8)
    keys = jax.device_put(keys, jax.sharding.NamedSharding(mesh, jax.P("data")))
    gathered = lambda keys: jax.sharding.reshard(keys, jax.sharding.NamedSharding(mesh, jax.P(None)))
    rows = ledger(gathered, keys)
    assert [row.payload for row in rows] == [8 * words * 4]
    compiled = jax.jit(gathered).lower(keys).compile()
    assert structure_of(rows, compiled, mesh).right and rows.total() == collectives(compiled, mesh).total()


def test_empty_arrays_do_not_move():
    mesh = tr.make_mesh(jax.devices()[:4], data=4)
    x = jax.device_put(jnp.ones((8, 0)), jax.sharding.NamedSharding(mesh, jax.P("data")))
    gathered = lambda x: jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, jax.P(None)))
    by_hand = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    for function in (gathered, by_hand):
        rows = ledger(function, x)
        assert not rows.rows and structure_of(rows, jax.jit(function).lower(x).compile(), mesh).right
