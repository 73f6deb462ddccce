"""Collectives that CUDA's compiler has combined, array by array."""

from trellis.inspect.collective import collectives_in
from trellis.inspect.hlo import parse_program

PROGRAM = """HloModule jit_f, num_partitions=2

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%joined (p: f32[6], q: f32[4]) -> f32[10] {
  %p = f32[6]{0} parameter(0)
  %q = f32[4]{0} parameter(1)
  ROOT %both = f32[10]{0} concatenate(%p, %q), dimensions={0}
}

ENTRY %main (x: f32[6], y: f32[4], n: s32[2]) -> f32[10] {
  %x = f32[6]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %n = s32[2]{0} parameter(2)
  %sent = ((f32[6]{0}, s32[2]{0}), (f32[6]{0}, s32[2]{0})) collective-permute-start(%x, %n), source_target_pairs={{0,1},{1,0}}
  %long = f32[10]{0} fusion(%x, %y), kind=kLoop, calls=%joined
  ROOT %total = f32[10]{0} all-reduce(%long), replica_groups={{0,1}}, to_apply=%sum
}
"""  # noqa: E501


def arrays(text):
    return [[(array.dtype, array.shape) for array in found.arrays] for found in collectives_in(parse_program(text), 2)]


def test_arrays_that_are_sent_together():
    assert arrays(PROGRAM)[0] == [("f32", (6,)), ("s32", (2,))]
    in_place = PROGRAM.replace("((f32[6]{0}, s32[2]{0}), (f32[6]{0}, s32[2]{0}))", "(f32[6]{0}, s32[2]{0}, u32[])")
    assert arrays(in_place)[0] == [("f32", (6,))]


def test_arrays_that_are_laid_end_to_end():
    assert arrays(PROGRAM)[1] == [("f32", (6,)), ("f32", (4,))]
    written = 'dimensions={0}, metadata={op_name="jit(f)/concatenate"}'
    assert arrays(PROGRAM.replace("dimensions={0}", written))[1] == [("f32", (10,))]
    assert arrays(PROGRAM.replace("fusion(%x, %y), kind=kLoop, calls=%joined", "copy(%x)"))[1] == [("f32", (10,))]
