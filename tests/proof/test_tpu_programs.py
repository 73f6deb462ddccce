"""What libtpu writes, as the interpreter reads it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import trellis as tr
from trellis._compat import full_text
from trellis.mesh import make_mesh
from trellis.nn import dot_product_attention
from trellis.proof.interpreter import Failed, Interpreter, NotInterpreted

BYTES = "{0:T(1024)(128)(4,1)}"
JOINED = 'custom-call(%part0, %part1), custom_call_target="ConcatBitcast"'


def copied(whole: str, *cuts: tuple[int, int]) -> str:
    """An array of 3 x 16 x 128 numbers of two bytes each, copied as bytes in parts, and what is made of these."""
    parts = "".join(
        f"""
  start{i} = ((s8[12288]{BYTES}), s8[{end - begin}]{BYTES}, s32[]) slice-start(%bytes), slice={{[{begin}:{end}]}}
  part{i} = s8[{end - begin}]{BYTES} slice-done(%start{i})"""
        for i, (begin, end) in enumerate(cuts)
    )
    return f"""HloModule m
ENTRY main () -> bf16[3,16,128] {{
  x = bf16[3,16,128]{{2,1,0:T(8,128)(2,1)}} parameter(0)
  bytes = s8[12288]{BYTES} bitcast(%x){parts}
  ROOT whole = {whole}
}}
"""


@pytest.fixture
def x():
    numbers = np.random.default_rng(0).normal(size=(1, 3, 16, 128)).astype(ml_dtypes.bfloat16)
    return numbers.astype(np.float32)


@pytest.mark.parametrize("cut", [8192, 5120])
def test_an_array_that_is_copied_as_bytes(x, cut):
    text = copied(f"bf16[3,16,128]{{2,1,0:T(8,128)(2,1)S(1)}} {JOINED}", (0, cut), (cut, 12288))
    (found,) = Interpreter(text)([x])
    np.testing.assert_array_equal(found, x)


def test_bytes_read_in_another_order(x):
    """Two rows lie beside each other in each word: memory that is read row by row has every second number of a row."""
    text = copied(f"bf16[6144]{{0}} {JOINED}", (0, 8192), (8192, 12288))
    (found,) = Interpreter(text)([x])
    np.testing.assert_array_equal(found[0, :256], x[0, 0, :2].T.reshape(-1))


def test_bytes_that_are_no_numbers_any_more(x):
    parts = (0, 6144), (6144, 12288)
    reversed_ = copied("bf16[6144]{0} bitcast(%back)", *parts).replace(
        "  ROOT", f"  back = s8[12288]{BYTES} reverse(%bytes), dimensions={{0}}\n  ROOT"
    )
    with pytest.raises(NotInterpreted, match="bytes of several numbers as one"):
        Interpreter(reversed_)([x])
    added = copied(f"s8[6144]{BYTES} add(%part0, %part1)", *parts)
    with pytest.raises(Failed, match="add whole"):
        Interpreter(added)([x])


@pytest.mark.parametrize("parts", [((0, 8192), (8193, 12288)), ((0, 8192), (8191, 12288))])
def test_parts_that_are_not_all_of_it(x, parts):
    with pytest.raises(NotInterpreted, match="not all of an array, each once"):
        Interpreter(copied(f"bf16[3,16,128]{{2,1,0:T(8,128)(2,1)}} {JOINED}", *parts))([x])


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ("", lambda query, key: key <= query),
        ("sees(2 before 0 after 0 ahead)/", lambda query, key: (key <= query) & (key >= query - 2)),
        ("sees(2 before 1 after 3 ahead)/", lambda query, key: (key <= query + 4) & (key >= query + 1)),
    ],
    ids=["a causal mask", "a window", "a window of keys behind"],
)
@pytest.mark.parametrize("called", [False, True], ids=["written out", "called"])
def test_a_kernel_sees_what_its_author_says(said, seen, called):
    results = "f32[1,8,128], f32[1,8,128], f32[1,8,4], f32[1,1,8,4], f32[1,1,8,128]"
    outer, own = (f"jit(f)/{said}call", "") if called else ("", f"jit(f)/{said}")
    name = f'op_name="{own}splash_mha_fwd_residuals/pallas_call"'
    text = f"""HloModule m
attend () -> f32[1,1,8,4] {{
  q = f32[1,1,8,4] parameter(0)
  k = f32[1,1,8,4] parameter(1)
  v = f32[1,1,8,4] parameter(2)
  rows = s32[8,128] iota(), iota_dimension=0
  splash_mha_fwd_residuals.1 = ({results}) custom-call(%q, %k, %v, %rows), custom_call_target="tpu_custom_call", metadata={{{name}}}
  ROOT out = f32[1,1,8,4] get-tuple-element(%splash_mha_fwd_residuals.1), index=3
}}
ENTRY main () -> f32[1,1,8,4] {{
  x = f32[1,1,8,4] parameter(0)
  y = f32[1,1,8,4] parameter(1)
  z = f32[1,1,8,4] parameter(2)
  ROOT made = f32[1,1,8,4] call(%x, %y, %z), to_apply=%attend, metadata={{op_name="{outer}"}}
}}
"""  # noqa: E501
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 1, 1, 8, 4)).astype(np.float32)
    (found,) = Interpreter(text)([q, k, v])
    weights = np.exp(q[0, 0, 0] @ k[0, 0, 0].T) * seen(np.arange(8)[:, None], np.arange(8))
    total = weights.sum(1, keepdims=True)
    np.testing.assert_allclose(found[0, 0, 0], weights / np.where(total, total, 1) @ v[0, 0, 0], rtol=1e-5)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_product_in_groups_before_a_compiler_has_seen_it(swapped):
    given = [(12, 5), (3, 7, 5) if swapped else (3, 5, 7)]
    rows, weights = (np.random.default_rng(i).normal(size=size).astype(np.float32) for i, size in enumerate(given))
    sizes = np.int32([4, 0, 8])
    product = lambda x, w, n: jax.lax.ragged_dot(x, w.swapaxes(1, 2) if swapped else w, n)
    lowered = jax.jit(product).trace(rows, weights, sizes).lower(lowering_platforms=("tpu",))
    (found,) = Interpreter(full_text(lowered))([rows[None], weights[None], sizes[None]])
    weights = weights.swapaxes(1, 2) if swapped else weights
    np.testing.assert_allclose(found[0], np.concatenate([rows[:4] @ weights[0], rows[4:] @ weights[2]]), rtol=1e-5)


@pytest.mark.slow
def test_attention_under_a_window_is_proven():
    """Its kernels have one block, of which tables of blocks do not say what is hidden."""
    mesh = make_mesh(jax.devices()[:4], data=4)
    heads = {"q": 2, "k": 1, "v": 1}
    given = [jax.random.normal(jax.random.key(i), (4, 256, n, 64)) for i, n in enumerate(heads.values())]
    given = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in given]

    def gradients(implementation):
        attend = lambda *x: dot_product_attention(*x, causal=True, window=100, implementation=implementation)
        return jax.grad(lambda *x: jnp.sum(attend(*x) ** 2), (0, 1, 2))

    proof = tr.prove(gradients("splash"), *given, on="v5e:2x2", reference=gradients("reference"), explain=False)
    assert proof.proven and len(proof.kernels) == 3


@pytest.mark.slow
def test_a_ring_by_our_own_kernels_is_proven():
    """Of documents packed in a row, with heads that are narrower than the lanes."""
    mesh = make_mesh(jax.devices()[:4], context=4)
    heads = {"q": 2, "k": 1, "v": 1}
    given = [jax.random.normal(jax.random.key(i), (1, 2048, n, 64)) for i, n in enumerate(heads.values())]
    given.append(jnp.arange(2048)[None] // 390)
    given = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "context"))) for x in given]

    def gradients(implementation):
        def total(q, k, v, ids):
            return jnp.sum(dot_product_attention(q, k, v, segment_ids=(ids, ids), implementation=implementation) ** 2)

        return jax.grad(total, (0, 1, 2))

    proof = tr.prove(gradients("splash"), *given, on="v5e:2x2", reference=gradients("reference"), explain=False)
    assert proof.proven and proof.kernels == ("attention_further", "attention_gradient_further")


def test_booleans_that_are_summed_as_words():
    """Twelve booleans with the padding behind them, and a single one, travel in words of four."""
    type_, words = "{0:T(512)(128)(4,1)}", "{2,1,0:T(1,128)}"
    text = f"""HloModule m, num_partitions=2
add (a: u32[], b: u32[]) -> u32[] {{
  a = u32[] parameter(0)
  b = u32[] parameter(1)
  ROOT both = u32[] or(%a, %b)
}}
ENTRY main () -> (pred[12], pred[]) {{
  x = pred[12]{type_} parameter(0)
  one = pred[]{{:T(512)}} parameter(1)
  more = pred[512]{type_} custom-call(%x), custom_call_target="ZeroCrop"
  words = u32[1,1,128]{words} bitcast(%more)
  word = u32[]{{:T(128)}} bitcast(%one)
  sums = (u32[1,1,128]{words}, u32[]{{:T(128)}}) all-reduce(%words, %word), channel_id=1, replica_groups={{{{0,1}}}}, use_global_device_ids=true, to_apply=%add
  all = u32[1,1,128]{words} get-tuple-element(%sums), index=0
  any = u32[]{{:T(128)}} get-tuple-element(%sums), index=1
  found = pred[12]{type_} bitcast(%all)
  some = pred[]{{:T(512)}} bitcast(%any)
  ROOT both = (pred[12]{type_}, pred[]{{:T(512)}}) tuple(%found, %some)
}}
"""  # noqa: E501
    x = np.array([[1, 0, 0, 1] * 3, [0, 0, 1, 1] * 3], bool)
    found, some = Interpreter(text)([x, np.array([False, True])])
    np.testing.assert_array_equal(np.broadcast_to(found, x.shape), [x.any(0)] * 2)
    assert some.all()


def halves(kind: str, half: str) -> str:
    """A program that takes an array apart as TPUs do, and puts it together again with its lower half negated."""
    return f"""HloModule m
ENTRY main () -> {kind}[4] {{
  x = {kind}[4]{{0}} parameter(0)
  low = {half}[4]{{0}} custom-call(%x), custom_call_target="X64SplitLow"
  high = {half}[4]{{0}} custom-call(%x), custom_call_target="X64SplitHigh"
  negated = {half}[4]{{0}} negate(%low)
  ROOT whole = {kind}[4]{{0}} custom-call(%negated, %high), custom_call_target="X64Combine"
}}
"""


def test_halves_of_complex_numbers_are_real_and_imaginary():
    z = np.complex64([[0.5 + 0.25j, -1 - 2j, 3, 1j]])
    (found,) = Interpreter(halves("c64", "f32"))([z])
    np.testing.assert_array_equal(found, -z.conj())


def test_halves_of_words_are_lower_and_upper():
    x = np.int64([[5 << 32 | 1, -1, 7, 1 << 40]])
    (found,) = Interpreter(halves("s64", "u32"))([x])
    low = x & 0xFFFFFFFF
    np.testing.assert_array_equal(found, x - low + (-low & 0xFFFFFFFF))


def test_floats_of_64_bits_in_halves_are_refused():
    with pytest.raises(NotInterpreted, match="floats of 64 bits, which TPUs compute"):
        Interpreter(halves("f64", "f32"))([np.ones((1, 4))])


@pytest.mark.slow
def test_complex_programs_are_proven():
    mesh = make_mesh(jax.devices()[:4], data=2, model=2)
    z = jax.device_put(jnp.full((8, 256), 0.5 + 0.25j, jnp.complex64), NamedSharding(mesh, PartitionSpec("data")))
    proof = tr.prove(lambda z: (z * z, jnp.fft.fft(z.real)), z, on="v5e:2x2", explain=False)
    assert proof.proven
