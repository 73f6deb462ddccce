"""What compilers refuse, and what is kept of what they compiled."""

import pytest

from tests.plan.small import small
from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.hardware.described import described_devices
from trellis.plan import compile as compiling
from trellis.plan.prepared import prepare
from trellis.plan.quick import quick_plan
from trellis.plan.verdict import judge, verdict_text


def test_the_compiler_is_missing(monkeypatch):
    monkeypatch.setattr("trellis.mesh.topology.importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(UserError) as error:
        compiling.compiler_devices(target("v5e:2x2"))
    assert "no compiler for v5e:2x2" in str(error.value)
    assert "pip install" in str(error.value) and "without --compile needs no compiler" in str(error.value)


OUT_OF_MEMORY = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom:
Ran out of memory in memory space hbm. Used 27.44G of 15.75G hbm. Exceeded hbm capacity by 11.69G.

Largest program allocations in hbm:

  1. Size: 8.00G
     Operator: op_name="jit(step)/jvp()/while/body/dot_general" source_file="/a/b/llama.py" source_line=118
     Shape: f32[64,4096,8192]{2,1,0:T(8,128)}
     Unpadded size: 8.00G
     XLA label: fusion.3 = fusion(...)
     Allocation type: HLO temp

  2. Size: 512.00M
     Shape: bf16[16,1024,16384]{2,1,0}
     XLA label: copy.1 = copy(...)
"""


def test_out_of_memory_is_a_finding():
    found = compiling._refused(OUT_OF_MEMORY, target("v5e:2x2"), 1.0, {"jax": "0"}, {})
    assert not found.fits
    assert found.excess == pytest.approx(11.69 * 2**30, rel=1e-3)
    assert found.peak == pytest.approx(27.44 * 2**30, rel=1e-3)
    first, second = found.largest
    assert first.what == "f32[64,4096,8192]" and first.num_bytes == 8 * 2**30
    assert first.source.startswith("llama.py:118 jit(step)")
    assert second.num_bytes == 2**29


@pytest.mark.slow
def test_buffers_have_names_where_the_compiler_lists_none():
    run, where = small(batch_size="64"), target("v5e:2x2")
    prog, plan = prepare(run, where, described_devices(where)), quick_plan(run, where)
    message = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: the total (27.44G) exceeds available HBM (15.75G)"
    found = compiling._refused(message, where, 1.0, {"jax": "0"}, {})
    assert found.largest == () and found.excess == pytest.approx(11.69 * 2**30, rel=1e-3)
    words = verdict_text(plan, judge(plan, prog, found))
    assert "DOES NOT FIT: 11.7 GiB more than 15.8 GiB" in words
    assert "carry between layers" in words and "from types: the compiler gave up before it placed buffers" in words


def test_other_refusals_are_not_memory():
    with pytest.raises(RuntimeError, match="the compiler for v5e:2x2 refused the step"):
        compiling._refused("INTERNAL: no", target("v5e:2x2"), 1.0, {}, {})
    with pytest.raises(UserError, match="Compiler options must be known to the compiler and have valid values."):
        compiling._refused("No such compile option: 'xla_no'", target("v5e:2x2"), 1.0, {}, {})
    message = "INVALID_ARGUMENT: While setting option xla_gpu_autotune_level, 'two' is not a valid int32 value."
    with pytest.raises(UserError) as error:
        compiling._refused(message, target("8xH100"), 1.0, {}, {"xla_gpu_autotune_level": "two"})
    assert str(error.value) == (
        "Compiler options must be known to the compiler and have valid values.\n"
        f"  seen:  {message}\n"
        "  where: compiler_options\n"
        "  fix:   leave the option out, write its value as this platform's XLA does (True or False on GPUs), or "
        "install a version of the compiler that has it"
    )


def test_compiled_programs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory = {"arguments": 3, "outputs": 2, "aliased": 2, "temporaries": 4, "code": 1, "host": 0}
    lost = (compiling.Allocation(1.0, "f32[2]", "here"),)
    compiling._write("key", compiling.Compiled("HloModule", memory, 2.0, False, 0.0, lost, {"jax": "0"}, {}))
    found = compiling._read("key")
    assert found.cached and found.text == "HloModule" and found.peak == 8 and found.largest == lost
    assert compiling._read("other") is None
    before = compiling._key("module", gpus := target("8xH100"), {}, {})
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")  # which gives another program
    assert compiling._key("module", gpus, {}, {}) != before
