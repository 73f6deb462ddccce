"""Programs for CPUs whose collectives would meet otherwise when they are loaded are neither kept nor taken."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import trellis as tr
from trellis.inspect.meeting import in_order, keep_what_loads_right
from trellis.train.compilation import CompiledStep, options_for

P = jax.sharding.PartitionSpec


def looped(x, over=3):
    return jax.lax.scan(
        lambda x, _: (jnp.sin(x) + jax.lax.all_gather(x[:2], "x", tiled=True).sum(), None), x, length=over
    )[0]


def loops_beside_each_other(a, b):
    return looped(a), looped(b)


def a_loop_behind_a_loop(a, b):
    a = looped(a)
    return a, looped(a + b)


def a_sum_before_a_loop(a, b):
    return jax.lax.psum(a, "x"), looped(b)


def a_branch_beside_a_loop(a, b):
    return jax.lax.cond(a.sum() > 0, looped, lambda x: x, a), looped(b)


def sums_beside_each_other(a, b):
    return jax.lax.psum(a, "x"), jax.lax.psum(b * 2, "x")


def compiled(function):
    mesh = tr.make_mesh(x=8)
    x = jax.device_put(jnp.arange(8 * 64.0), jax.NamedSharding(mesh, P("x")))
    split = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return jax.jit(split).lower(x, x + 1).compile()


@pytest.mark.parametrize(
    ("function", "loaded", "here"),
    [
        (loops_beside_each_other, False, False),
        (a_branch_beside_a_loop, False, False),
        (a_sum_before_a_loop, False, True),
        (a_loop_behind_a_loop, True, True),
        (sums_beside_each_other, True, True),
    ],
)
def test_what_a_loop_does_not_wait_for_may_meet_what_stands_inside(function, loaded, here):
    text = compiled(function).as_text()
    assert (in_order(text, loaded=True), in_order(text, loaded=False)) == (loaded, here)


LOOPS = """HloModule loops, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (given: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %given = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %turn = s32[] get-tuple-element(%given), index=0
  %x = f32[8]{0} get-tuple-element(%given), index=1
  %kept = f32[8]{0} get-tuple-element(%given), index=2
  %inner = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  ROOT %next = (s32[], f32[8]{0}, f32[8]{0}) tuple(%turn, %inner, %kept)
}

%more (had: (s32[], f32[8], f32[8])) -> pred[] {
  %had = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (p: f32[8], q: f32[8]) -> (f32[8], f32[8]) {
  %p = f32[8]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %zero = s32[] constant(0)
  %angle = f32[8]{0} atan2(%p, %q)
  %start = (s32[], f32[8]{0}, f32[8]{0}) tuple(%zero, %angle, %q)
  %loop = (s32[], f32[8]{0}, f32[8]{0}) while(%start), condition=%more, body=%body
  %element = f32[8]{0} get-tuple-element(%loop), index=INDEX
  %behind = f32[8]{0} all-reduce(%element), replica_groups={}, to_apply=%add
  ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%behind, %element)
}
"""


@pytest.mark.parametrize(("index", "waits"), [("1", True), ("2", False)])
def test_what_a_loop_only_passes_on_waits_for_nothing(index, waits):
    text = LOOPS.replace("INDEX", index)
    assert in_order(text, loaded=False) == waits
    assert in_order(text.replace("all-reduce(%element)", f"all-reduce(%loop#{index})"), loaded=False) == waits


@pytest.fixture
def cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield lambda function: len(list(tmp_path.glob(f"*{function.__name__}*-cache")))  # not what makes its arguments
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.parametrize(("function", "kept"), [(loops_beside_each_other, False), (a_loop_behind_a_loop, True)])
def test_only_what_loads_right_is_kept(cache, function, kept):
    compiled(function)
    assert cache(function) == kept


@pytest.mark.parametrize(("function", "taken"), [(loops_beside_each_other, False), (a_loop_behind_a_loop, True)])
def test_what_another_program_kept_is_not_taken_where_it_would_load_wrong(cache, function, taken, monkeypatch):
    from jax._src import compilation_cache as private

    assert keep_what_loads_right()
    events = []
    jax.monitoring.register_event_listener(listener := lambda event, **_: events.append(event))
    try:
        for keep in (private.put_executable_and_time.__wrapped__, private.put_executable_and_time):
            monkeypatch.setattr(private, "put_executable_and_time", keep)  # at first as without Trellis
            events.clear()
            compiled(function)
            assert cache(function)
    finally:
        jax.monitoring.unregister_event_listener(listener)
    assert ("/jax/compilation_cache/cache_hits" in events) == taken


def a_gather_behind_a_loop(state, batch):
    """Which XLA puts before the loop, unless it is to save memory (docs/published-bugs.md, 21)."""

    def body(x, _):
        return jnp.cos(x) + jax.lax.all_gather(x[8:12], "x", tiled=True).sum(), x[:2]

    x, rows = jax.lax.scan(body, jnp.sin(state), None, length=4)
    return (x, jax.lax.all_gather(batch, "x", tiled=True), rows), {"sums": [jnp.cumsum(batch + i) for i in range(8)]}


def test_a_step_whose_collectives_would_run_beside_a_loops_is_compiled_in_the_other_order():
    mesh = tr.make_mesh(x=2, devices=jax.devices()[:2])
    out = (P("x"), P(None), P(None, "x")), P("x")
    step = jax.jit(jax.shard_map(a_gather_behind_a_loop, mesh=mesh, in_specs=P("x"), out_specs=out, check_vma=False))
    state, batch = (jax.device_put(jnp.ones(n), jax.NamedSharding(mesh, P("x"))) for n in (1024, 32))
    options = options_for("cpu", {}, devices=2)
    assert not in_order(step.lower(state, batch).compile(options).as_text(), loaded=False)
    compiled = CompiledStep(step, options)
    compiled(state, batch)
    assert in_order(compiled.programs[0].as_text(), loaded=False)
