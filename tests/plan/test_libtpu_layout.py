"""libtpu's memory layout, read from its dump."""

from trellis.plan.libtpu_layout import dump_options, read_layout

ASSIGNMENT = """BufferAssignment:
allocation 0: size 4, thread-local:
 value: <1 add.1 @0> (size=4,offset=0): f32[]{:T(128)}
allocation 1: size 4096, parameter 3, shape |f32[32,32]| at ShapeIndex {}, maybe-live-out:
 value: <2 param.3 @0> (size=4096,offset=0): f32[32,32]{1,0:T(8,128)}
allocation 2: size 9000000, preallocated-temp:
 value: <3 a.1 @0> (size=4000000,offset=0): f32[1000,1000]{1,0}
 value: <4 while.1{2} (phi) @0> (size=4000000,offset=0): f32[1000,1000]{1,0}
 value: <5 b.2 @0> (size=5000000,offset=4000000): bf16[2500,1000]{1,0}
 value: <6 c.3 @0> (size=3000000,offset=4000000): bf16[1500,1000]{1,0}
allocation 3: size 128000000 color 1, preallocated-temp:
 value: <7 d.4 @1> (size=100,offset=0): f32[25]{0}
allocation 4: size 512, constant:
 value: <8 e.5 @0> (size=512,offset=0): f32[128]{0}
"""
LIFE = """HloLiveRange (max 40):
  InstructionSequence:
    0:a.1
  BufferLiveRange:
    a.1{}:0-9
    while.1{2}:9-30
    b.2{}:10-20
    c.3{}:21-30
"""
PROGRAM = """HloModule step
ENTRY %main (param.3: f32[32,32]) -> f32[] {
  %param.3 = f32[32,32]{1,0} parameter(0), metadata={op_name="state.model.head.array"}
  %while.1 = f32[1000,1000]{1,0} while(%x), metadata={op_name="jit(step)/while"}
  ROOT %b.2 = bf16[2500,1000]{1,0} fusion(%y), metadata={op_name="step/dot" source_file="/a/llama.py" source_line=7}
}
"""


def dumped(folder):
    for kind, text in (("-buffer-assignment", ASSIGNMENT), ("-live-range", LIFE), ("", PROGRAM)):
        (folder / f"module_0000.step.after_optimizations{kind}.txt").write_text(text)
    return folder


def test_what_is_in_memory_at_the_highest_point(tmp_path):
    found = read_layout(dumped(tmp_path))
    assert found.num_bytes == 4096 + 9_000_000 + 512
    assert [(a.num_bytes, a.what, a.source) for a in found.largest] == [
        (5_000_000, "bf16[2500,1000]", "llama.py:7 step/dot"),
        (4_000_000, "f32[1000,1000]", "jit(step)/while"),
        (4096, "f32[32,32]", "state.model.head.array"),
    ]


def test_no_dump(tmp_path):
    assert read_layout(tmp_path) is None
    assert dump_options(tmp_path)["xla_dump_to"] == str(tmp_path)
