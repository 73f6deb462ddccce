"""Schedules replayed: what a step waits for, by the order of a compiled program's text."""

from pathlib import Path

import pytest

from trellis.inspect.collective import collectives_in
from trellis.inspect.compiled import gathered_beside, gathered_bytes
from trellis.inspect.hlo import parse_program
from trellis.inspect.replay import Sending, replay
from trellis.inspect.touched import touched_bytes

ON_SPARSECORES = (Path(__file__).parent / "sparsecores.hlo").read_text()
HEAD = """HloModule step, is_scheduled=true, num_partitions=4

"""
GATHER = "channel_id={n}, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}"


def started(n: int, of: str = "x") -> str:
    return f"  %start.{n} = (f32[2,8]{{1,0}}, f32[8,8]{{1,0}}) all-gather-start(%{of}), {GATHER.format(n=n)}\n"


def done(n: int) -> str:
    return f"  %done.{n} = f32[8,8]{{1,0}} all-gather-done(%start.{n})\n"


def worked(name: str) -> str:
    return f"  %{name} = f32[2,8]{{1,0}} negate(%x)\n"


def entry(*lines: str) -> str:
    return (
        "ENTRY %main (x: f32[2,8]) -> f32[2,8] {\n  %x = f32[2,8]{1,0} parameter(0)\n"
        + "".join(lines)
        + "  ROOT %last = f32[2,8]{1,0} copy(%x)\n}\n"
    )


def waits(
    text: str, takes: dict[str, float], links: dict[str, tuple[str, ...]] | None = None, computes=None, in_order=False
):
    """What is waited for, where gathers take 10 s by default and instructions what `computes` says, or nothing."""
    program = parse_program(HEAD + text)
    names = [c.name for c in collectives_in(program, 4)]
    sending = {name: Sending(takes.get(name, 10.0), (links or {}).get(name, ("data",)), in_order) for name in names}
    found = replay(program, lambda i: (computes or {}).get(i.name, 0.0), sending)
    return found.computing, dict(found.waits), found.seconds


def test_what_ends_where_it_starts_is_waited_for():
    text = entry(started(1), done(1), worked("a"))
    assert waits(text, {}, computes={"a": 30.0}) == (30.0, {"start.1": 10.0}, 40.0)


@pytest.mark.parametrize(("seconds", "waited"), [(4.0, 6.0), (10.0, 0.0), (25.0, 0.0)])
def test_what_is_beside_work_is_waited_for_as_far_as_it_is_longer(seconds, waited):
    text = entry(started(1), worked("a"), done(1))
    assert waits(text, {}, computes={"a": seconds}) == (seconds, {"start.1": waited}, seconds + waited)


@pytest.mark.parametrize(("in_order", "waited"), [(True, (0.0, 8.0)), (False, (8.0, 0.0))])
def test_those_over_the_same_links_share_them_or_go_one_after_the_other(in_order, waited):
    """Two of 10 s beside 12 s: one after the other they are there after 10 and 20, sharing both after 20."""
    text = entry(started(1), started(2), worked("a"), done(1), done(2))
    again = lambda links: waits(text, {}, links, {"a": 12.0}, in_order)[1]
    assert again(None) == {"start.1": waited[0], "start.2": waited[1]}
    assert again({"start.2": ("model", "data")}) == {"start.1": waited[0], "start.2": waited[1]}
    assert again({"start.2": ("model",)}) == {"start.1": 0.0, "start.2": 0.0}


def test_a_short_one_goes_past_a_long_one_where_they_share():
    text = entry(started(1), f"  %whole = f32[8,8]{{1,0}} all-gather(%x), {GATHER.format(n=9)}\n", worked("a"), done(1))
    assert waits(text, {"whole": 1.0}, computes={"a": 20.0})[1] == {"start.1": 0.0, "whole": 2.0}
    assert waits(text, {"whole": 1.0}, computes={"a": 20.0}, in_order=True)[1] == {"start.1": 0.0, "whole": 11.0}


def test_a_synchronous_one_holds_everything_up():
    text = entry(f"  %whole = f32[8,8]{{1,0}} all-gather(%x), {GATHER.format(n=1)}\n", worked("a"))
    assert waits(text, {}, computes={"a": 30.0}) == (30.0, {"whole": 10.0}, 40.0)


def test_what_nobody_ends_is_there_when_the_program_ends():
    assert waits(entry(started(1), worked("a")), {}, computes={"a": 4.0})[1] == {"start.1": 6.0}


LOOP = """%body (x: f32[2,8]) -> f32[2,8] {
  %x = f32[2,8]{1,0} parameter(0)
BODY
  ROOT %b = f32[2,8]{1,0} copy(%x)
}

%condition (c: f32[2,8]) -> pred[] {
  %c = f32[2,8]{1,0} parameter(0)
  ROOT %more = pred[] constant(true)
}

"""
RUN = (
    "  %loop = f32[2,8]{1,0} while(%x), condition=%condition, body=%body, "
    'backend_config={"known_trip_count":{"n":"5"}}\n'
)


def test_a_loop_waits_in_each_of_its_turns():
    loop = LOOP.replace("BODY\n", started(1) + worked("inside") + done(1))
    text = loop + entry(RUN, worked("a"))
    assert waits(text, {}, computes={"inside": 7.0, "a": 1.0}) == (36.0, {"start.1": 15.0}, 51.0)


def test_one_that_is_under_way_while_a_loop_runs_is_beside_it():
    loop = LOOP.replace("BODY\n", worked("inside"))
    text = loop + entry(started(1), RUN, done(1))
    assert waits(text, {}, computes={"inside": 1.5})[1] == {"start.1": 2.5}


SPARSE_CORE = """%called (p: f32[2,8]) -> f32[8,8] {
  %p = f32[2,8]{1,0} parameter(0)
  ROOT %inner = f32[8,8]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}, execution_thread="sparsecore"

"""
CALL = '  %begun = ((f32[2,8]), f32[8,8]) call-start(%x), async_execution_thread="sparsecore", to_apply=%called\n'
ENDED = "  %ended = f32[8,8]{1,0} call-done(%begun)\n"


def test_a_sparse_core_s_hides_nothing_where_its_end_follows_its_start():
    assert waits(SPARSE_CORE + entry(CALL, ENDED, worked("a")), {}, computes={"a": 9.0})[1] == {"inner": 10.0}
    assert waits(SPARSE_CORE + entry(CALL, worked("a"), ENDED), {}, computes={"a": 9.0})[1] == {"inner": 1.0}


TPU = (Path(__file__).parent / "tpu.hlo").read_text()
DONE = """%finish (p3: bf16[256,64]) -> bf16[256,256] {
  %p3 = bf16[256,64]{0,1} parameter(0)
  %all-gather.3 = bf16[256,256]{0,1} all-gather(%p3), channel_id=5, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}, backend_config={"async_collective_fusion_config":{"fusion_type":"DONE"}}
  ROOT %custom-call.2 = bf16[256,256]{0,1} custom-call(%all-gather.3), custom_call_target="AsyncCollectiveDone"
}

%body (state"""  # noqa: E501
LATER = "  %finished = bf16[256,256]{0,1} fusion(%w), kind=kCustom, calls=%finish\n"


@pytest.mark.parametrize("before", [False, True])
def test_a_fusion_of_a_tpu_s_compiler_ends_what_another_of_its_channel_starts(before):
    """Three turns: a gather of 8 s beside a product of 5, or ended before it; a permute; a sum inside a fusion."""
    line = next(line for line in TPU.splitlines(keepends=True) if "%fusion.1 =" in line)
    text = TPU.replace("%body (state", DONE).replace(line, LATER + line if before else line + LATER)
    program = parse_program(text)
    names = {c.kind: c.name for c in collectives_in(program, 8)}
    assert len(names) == 3
    sending = {name: Sending(8.0 if kind == "all-gather" else 1.0, (kind,)) for kind, name in names.items()}
    found = replay(program, lambda i: 5.0 if i.name == "fusion.1" else 0.0, sending)
    wanted = {"all-gather": 24.0 if before else 9.0, "permute": 3.0, "reduce-scatter": 1.0}
    assert found.computing == 15.0
    assert {kind: found.waits[name] for kind, name in names.items()} == wanted


TOUCHED = """%slices (w: f32[12,8,8], i: s32[]) -> f32[8,8] {
  %w = f32[12,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %layer = f32[1,8,8]{2,1,0} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,8,8}
  %view = f32[8,8]{1,0} bitcast(%layer)
  ROOT %twice = f32[8,8]{1,0} add(%view, %view)
}

%writes (all: f32[12,8,8], x: f32[8,8], i.1: s32[]) -> f32[12,8,8] {
  %all = f32[12,8,8]{2,1,0} parameter(0)
  %x = f32[8,8]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %row = f32[1,8,8]{2,1,0} bitcast(%x)
  ROOT %into = f32[12,8,8]{2,1,0} dynamic-update-slice(%all, %row, %i.1, %zero.1, %zero.1)
}

ENTRY %main (w0: f32[12,8,8], n: s32[]) -> f32[12,8,8] {
  %w0 = f32[12,8,8]{2,1,0} parameter(0)
  %n = s32[] parameter(1)
  %one = f32[8,8]{1,0} fusion(%w0, %n), kind=kLoop, calls=%slices
  %negated = f32[8,8]{1,0} negate(%one)
  %both = (f32[8,8]{1,0}, s32[]) tuple(%negated, %n)
  ROOT %kept = f32[12,8,8]{2,1,0} fusion(%w0, %negated, %n), kind=kLoop, calls=%writes
}
"""


def test_a_slice_counts_and_not_what_it_is_cut_from():
    program = parse_program(HEAD + TOUCHED)
    touched = {name: touched_bytes(program, program.by_name[name]) for name in ("one", "negated", "both", "kept")}
    # Read and written; the number that says where counts, too.
    assert touched == {"one": 2 * 256 + 4, "negated": 2 * 256, "both": 0, "kept": 2 * 256 + 4}


def test_rows_that_sparsecores_gather_are_counted_once_and_beside_what_computes():
    program = parse_program(ON_SPARSECORES)
    moved = 2 * 6 * 4 * 4
    assert gathered_beside(program) == {"offloaded": moved} and not gathered_bytes(program)
    alone = ON_SPARSECORES.replace('async_execution_thread="sparsecore", ', "")
    assert not gathered_beside(parse_program(alone))
    assert sum(gathered_bytes(parse_program(alone)).values()) == moved
    found = replay(program, lambda i: 3.0 if i.name == "a" else 0.0, {"offloaded": Sending(10.0, ("SparseCores",))})
    assert (found.computing, dict(found.waits)) == (3.0, {"offloaded": 7.0})
