"""Along which mesh axes values of compiled programs may differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trellis.inspect.compiled import program_of
from trellis.inspect.copies import copies_apart
from trellis.inspect.hlo import parse_program
from trellis.inspect.numbers import left_out

MESH = {"data": 2, "model": 2}
PROGRAM = """HloModule jit_step, input_output_alias={ {0}: (0, {}, may-alias) }, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%more (state: (f32[8], s32[])) -> (f32[8], s32[]) {
  %state = (f32[8]{0}, s32[]) parameter(0)
  %w.1 = f32[8]{0} get-tuple-element(%state), index=0
  %n.1 = s32[] get-tuple-element(%state), index=1
  ROOT %again = (f32[8]{0}, s32[]) tuple(%w.1, %n.1)
}

%going (state: (f32[8], s32[])) -> pred[] {
  %state.1 = (f32[8]{0}, s32[]) parameter(0)
  %n.2 = s32[] get-tuple-element(%state.1), index=1
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%n.2, %three), direction=LT
}

ENTRY %main (w: f32[8], x: f32[4]) -> (f32[8], f32[]) {
  %w = f32[8]{0} parameter(0), sharding={devices=[2,2]<=[2,2]T(1,0) last_tile_dim_replicate}, metadata={op_name="state.w"}
  %x = f32[4]{0} parameter(1), sharding={devices=[2,2]<=[4] last_tile_dim_replicate}
  %zero = f32[] constant(0)
  %own = f32[] reduce(%x, %zero), dimensions={0}, to_apply=%sum
  %loss = f32[] all-reduce(%own), replica_groups={{0,2},{1,3}}, to_apply=%sum
  %device = u32[] partition-id()
  %table = u32[4]{0} constant({0, 1, 0, 1})
  %place = u32[1]{0} dynamic-slice(%table, %device), dynamic_slice_sizes={1}
  %offset = u32[] reshape(%place)
  %scale = f32[] convert(%offset)
  %wide = f32[8]{0} broadcast(%scale), dimensions={}
  %one = s32[] constant(1)
  %first = (f32[8]{0}, s32[]) tuple(%wide, %one)
  %last = (f32[8]{0}, s32[]) while(%first), condition=%going, body=%more
  %much = f32[8]{0} get-tuple-element(%last), index=0
  %step = f32[8]{0} multiply(%w, %much)
  ROOT %new = (f32[8]{0}, f32[]) tuple(%step, %loss)
}
"""  # noqa: E501


def apart(*changes, whole=()):
    text = PROGRAM
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return [(each.what, each.axes) for each in copies_apart(parse_program(text), MESH, whole)]


def test_copies_stay_copies():
    """`w` is sliced over model, `x` over data; the table says where a device is along model, and not along data."""
    assert apart() == []


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ("all-reduce(%own), replica_groups={{0,2},{1,3}}, to_apply=%sum", "copy(%own)", ("result 1", ("data",))),
        ("replica_groups={{0,2},{1,3}}", "replica_groups={{0,1},{2,3}}", ("result 1", ("data",))),
        ("replica_groups={{0,2},{1,3}}", "replica_groups={{0},{1},{2},{3}}", ("result 1", ("data",))),
        ("constant({0, 1, 0, 1})", "constant({0, 1, 1, 0})", ("state.w", ("data",))),
        ("sharding={devices=[2,2]<=[2,2]T(1,0) last", "sharding={devices=[2,2]<=[4] last", ("state.w", ("model",))),
        ("dynamic_slice_sizes={1}\n  %offset = u32[] reshape(%place)", "dynamic_slice_sizes={1}\n"
         "  %offset = u32[] reshape(%device)", ("state.w", ("data",))),
    ],
    ids=["dropped", "other axis", "alone", "other table", "other sharding", "device number"],
)  # fmt: skip
def test_what_may_differ(before, after, wrong):
    assert apart((before, after)) == [wrong]


def test_a_table_that_is_left_out_says_nothing():
    """As JAX's `as_text` does with one of more than ten devices: whole programs have it."""
    assert apart(("constant({0, 1, 0, 1})", "constant({...})"), ("reshape(%place)", "reshape(%device)")) == []


def test_tables_of_more_than_ten_devices_are_read():
    table = jax.jit(lambda i: jnp.asarray(np.arange(12)[::-1] % 5)[i]).lower(jnp.int32(0)).compile()
    assert any(map(left_out, constants_of(parse_program(table.as_text()))))
    assert not any(map(left_out, constants_of(program_of(table))))


def constants_of(program):
    return [i for instructions in program.computations.values() for i in instructions if i.op == "constant"]


def test_what_a_loop_makes_different():
    made = "%far = f32[8]{0} all-to-all(%w.1), replica_groups={{0,2},{1,3}}, dimensions={0}\n  ROOT %again"
    tuple_ = ("tuple(%w.1, %n.1)", "tuple(%far, %n.1)")
    assert apart(("ROOT %again", made), tuple_) == [("state.w", ("data",))]


@pytest.mark.parametrize(
    ("pairs", "wrong"),
    [
        ("{0,1},{1,0},{2,3},{3,2}", None),  # along model, along which it differs anyway
        ("{0,2},{1,3},{2,0},{3,1}", None),  # along data, along which all are the same
        ("{0,0},{1,2},{2,1},{3,3}", ("data",)),  # one axis for the other
        ("{0,1},{1,2},{2,3},{3,0}", None),  # a ring of all
        ("{0,3},{1,1},{2,2},{3,0}", ("data",)),
        ("{0,2},{1,3}", ("data",)),  # the others get zeros
    ],
)
def test_what_a_permute_brings(pairs, wrong):
    """`w` differs along model, and not along data."""
    lines = f"  %sent = f32[8]{{0}} collective-permute(%w), source_target_pairs={{{pairs}}}\n  %step = f32[8]{{0}} "
    found = apart(("  %step = f32[8]{0} ", lines), ("multiply(%w, %much)", "multiply(%sent, %much)"))
    assert found == ([] if wrong is None else [("state.w", wrong)])


def test_a_ring_of_one_device():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    sliced = jax.NamedSharding(mesh, jax.P("data"))
    sent = lambda x: jax.lax.ppermute(x, "data", []) + jax.lax.ppermute(x, "data", [(0, 0)])
    ring = jax.jit(jax.shard_map(sent, mesh=mesh, in_specs=sliced.spec, out_specs=sliced.spec))
    compiled = ring.lower(jax.device_put(jnp.ones((2, 3)), sliced)).compile()
    assert not list(copies_apart(program_of(compiled), mesh.shape))


def test_axes_that_a_permute_and_an_exchange_swap():
    """Slices along model, exchanged for slices along data and sent there: each device along data has the same."""
    lines = """  %there = f32[8]{0} collective-permute(%w), source_target_pairs={{0,0},{1,2},{2,1},{3,3}}
  %back = f32[8]{0} collective-permute(%there), source_target_pairs={{0,0},{1,2},{2,1},{3,3}}
  %step = f32[8]{0} """
    assert apart(("  %step = f32[8]{0} ", lines), ("multiply(%w, %much)", "multiply(%back, %much)")) == []


def test_arrays_that_are_laid_end_to_end():
    both = """  %parts = f32[2]{0} concatenate(%mine, %ours), dimensions={0}
  %total = f32[2]{0} all-reduce(%parts), replica_groups={{0,1},{2,3}}, to_apply=%sum
  %last.1 = f32[1]{0} slice(%total), slice={[1:2]}
  %loss = f32[] bitcast(%last.1)
"""
    before = "  %loss = f32[] all-reduce(%own), replica_groups={{0,2},{1,3}}, to_apply=%sum\n"
    ours = "  %mine = f32[1]{0} bitcast(%own)\n  %one.1 = f32[] constant(1)\n  %ours = f32[1]{0} bitcast(%one.1)\n"
    assert apart((before, ours + both)) == []
    assert apart((before, ours + both.replace("[1:2]", "[0:1]"))) == [("result 1", ("data",))]


@pytest.mark.parametrize(
    ("used", "right"),
    [
        ("add(%half, %own)", True),
        ("multiply(%half, %three.1)", True),
        ("divide(%half, %three.1)", True),
        ("select(%yes, %half, %own)", True),
        ("divide(%three.1, %half)", False),
        ("multiply(%half, %half)", False),
        ("multiply(%own, %half)", False),
        ("divide(%half, %own)", False),
        ("maximum(%half, %three.1)", False),
    ],
)
def test_a_number_that_is_part_of_a_sum(used, right):
    """`%own` differs over data; a sum over model leaves it part of a sum, which `%loss` settles."""
    before = "  %loss = f32[] all-reduce(%own), "
    lines = f"""  %half = f32[] all-reduce(%own), replica_groups={{{{0,1}},{{2,3}}}}, to_apply=%sum
  %three.1 = f32[] constant(3)
  %yes = pred[] constant(true)
  %used = f32[] {used}
  %loss = f32[] all-reduce(%used), """
    assert apart((before, lines)) == ([] if right else [("a number that is used as a sum", ("data",))])


def test_one_row_of_each_device_is_no_number():
    """What a device counts of its only sequence, whose positions are sliced over model: it differs over data."""
    before = "  %loss = f32[] all-reduce(%own), "
    lines = """  %row = f32[1]{0} reshape(%own)
  %counted = f32[1]{0} all-reduce(%row), replica_groups={{0,1},{2,3}}, to_apply=%sum
  %ones = f32[1]{0} constant({1})
  %most = f32[1]{0} maximum(%counted, %ones)
  %share = f32[] reshape(%most)
  %loss = f32[] all-reduce(%share), """
    assert apart((before, lines)) == []
    assert apart((before, lines), whole=[frozenset({"data"})]) == apart((before, lines))
    assert apart((before, lines), whole=[frozenset({"model"})]) == []


def test_a_sharding_that_is_not_known_says_nothing():
    unknown = ("sharding={devices=[2,2]<=[4] last_tile_dim_replicate}", "sharding={manual}")
    assert apart(unknown, ("all-reduce(%own), replica_groups={{0,2},{1,3}}, to_apply=%sum", "copy(%own)")) == []
