"""What CUDA's compiler writes, in the forms of several versions of JAX, as the interpreter reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trellis.commands.line import main
from trellis.proof.interpreter import Failed, Interpreter, NotInterpreted
from trellis.proof.interpreter.kernels.attention import forward

BATCH, LENGTH, HEADS, KEY_HEADS, SIZE = 2, 8, 4, 2, 4
SCALE, SEEN = 0.5, np.tril(np.ones((LENGTH, LENGTH), bool))
ADD = """HloModule m, num_partitions=4
add (a: f32[], b: f32[]) -> f32[] {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(%a, %b)
}
ENTRY main () -> f32[] {
"""
GROUPS = "channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=%add"


@pytest.mark.parametrize("type_", ["f32[3]{0}", "((f32[3]{0}), f32[3]{0})"], ids=["0.10", "0.11"])
def test_the_start_of_a_sum(type_):
    text = f"""{ADD}
  x = f32[3]{{0}} parameter(0)
  start = {type_} all-reduce-start(%x), {GROUPS}
  ROOT done = f32[3]{{0}} all-reduce-done(%start)
}}
"""
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    (found,) = Interpreter(text)([x])
    np.testing.assert_array_equal(found, (x.reshape(2, 2, 3).sum(1))[[0, 0, 1, 1]])


@pytest.mark.parametrize(
    "type_", ["(f32[3]{0}, s32[])", "((f32[3]{0}, s32[]), (f32[3]{0}, s32[]))"], ids=["0.10", "0.11"]
)
def test_the_start_of_two_sums(type_):
    text = f"""{ADD}
  x = f32[3]{{0}} parameter(0)
  n = s32[] parameter(1)
  start = {type_} all-reduce-start(%x, %n), {GROUPS}
  done = (f32[3]{{0}}, s32[]) all-reduce-done(%start)
  ROOT count = s32[] get-tuple-element(%done), index=1
}}
"""
    given = [np.zeros((4, 3), np.float32), np.arange(4, dtype=np.int32)]
    (found,) = Interpreter(text)(given)
    np.testing.assert_array_equal(found, [1, 1, 5, 5])


@pytest.mark.parametrize("narrow", ["u16[2,6]{1,0}", "u16[2,6]{0,1}", "u8[2,12]{1,0}"])
def test_numbers_as_words_of_their_bits(narrow):
    """As rows are packed that go to experts: of other sizes than their numbers, and back, in another order too."""
    text = f"""HloModule m
ENTRY main () -> f32[2,3] {{
  x = f32[2,3]{{1,0}} parameter(0)
  words = {narrow} bitcast(%x)
  same = {narrow} copy(%words)
  back = f32[2,3]{{1,0}} bitcast(%same)
  ROOT both = ({narrow}, f32[2,3]{{1,0}}) tuple(%words, %back)
}}
"""
    x = np.array([[[1.0, -2.5, np.inf], [0.0, 3e-9, 7.0]]], np.float32)
    words, back = Interpreter(text)([x])
    np.testing.assert_array_equal(back, x)
    flat = words[0].T if "{0,1}" in narrow else words[0]
    assert flat.tobytes() == x.tobytes()


def call(backward: bool, results: str, operands: dict[str, str], settings: str = "") -> str:
    """A program that is one call of cuDNN's attention with a bias."""
    lines = [f"  {name} = {type_} parameter({i})" for i, (name, type_) in enumerate(operands.items())]
    config = f'"fmha_scale":{SCALE},"mask_type":"CAUSAL","dropout_rate":0,"sliding_window_length":0{settings}'
    names = ", ".join(f"%{name}" for name in operands)
    return "\n".join(
        [
            "HloModule m, num_partitions=1",
            "ENTRY main () -> f32[] {",
            *lines,
            f"  ROOT call = {results} custom-call({names}), "
            f'custom_call_target="__cudnn$fmhaScaleBiasSoftmax{"Backward" if backward else ""}", '
            f'backend_config={{"cudnn_fmha_backend_config":{{{config}}}}}',
            "}",
        ]
    )


Q, K = (f"bf16[{BATCH},{LENGTH},{heads},{SIZE}]{{3,2,1,0}}" for heads in (HEADS, KEY_HEADS))
OUT, D_K = (f"bf16[{BATCH},{heads},{LENGTH},{SIZE}]{{3,1,2,0}}" for heads in (HEADS, KEY_HEADS))
BIAS, LOG_SUM = f"bf16[1,{HEADS},{LENGTH},{LENGTH}]{{3,2,1,0}}", f"f32[{BATCH},{HEADS},{LENGTH}]{{2,1,0}}"


def attention(q, k, v, bias):
    """`batch heads pos head_dim`, of `batch pos heads head_dim`."""
    k, v = (jnp.repeat(x, HEADS // KEY_HEADS, 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE + bias
    return jnp.einsum("bhqk,bkhd->bhqd", jax.nn.softmax(jnp.where(SEEN, scores, -jnp.inf)), v)


@pytest.fixture(scope="module")
def given():
    """Queries, keys, values and the bias."""
    random = np.random.default_rng(0)
    shapes = [(BATCH, LENGTH, heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)] + [(1, HEADS, LENGTH, LENGTH)]
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def run(text, arrays):
    return [x[0] for x in Interpreter(text)([a[None] for a in arrays])]


@pytest.mark.slow
def test_attention_of_cudnn(given):
    """Forward, and backward with and without a gradient of the bias, which JAX 0.11 leaves out where none is asked."""
    operands = {"q": Q, "k": K, "v": K, "bias": BIAS}
    out, log_sum, _ = run(call(False, f"({OUT}, {LOG_SUM}, u8[0]{{0}})", operands), given)
    wanted, pull = jax.vjp(attention, *given)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)
    alone, workspace = run(call(False, f"({OUT}, u8[0]{{0}})", operands), given)
    assert (alone == out).all() and workspace.size == 0

    d_out = np.random.default_rng(1).normal(size=wanted.shape).astype(np.float32)
    kept = [*given[:3], log_sum, d_out.swapaxes(1, 2), given[3], out.swapaxes(1, 2)]
    operands = {"q": Q, "k": K, "v": K, "log_sum": LOG_SUM, "d_out": Q, "bias": BIAS, "out": Q}
    d_q, d_k, d_v, d_bias = pull(d_out)
    gradients = [d_q.swapaxes(1, 2), d_k.swapaxes(1, 2), d_v.swapaxes(1, 2), d_bias]
    for results in (f"({OUT}, {D_K}, {D_K}, {BIAS}, u8[0]{{0}})", f"({OUT}, {D_K}, {D_K}, u8[0]{{0}})"):
        *found, workspace = run(call(True, results, operands), kept)
        assert workspace.size == 0
        for mine, theirs in zip(found, gradients[: len(found)], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


# Two groups, of three rows and one; the last is nobody's, and where it is from is anything.
GROUPS_AT = {"first": np.array([0, 3], np.int32), "end": np.array([3, 4], np.int32)}
SOURCES, TARGETS = np.array([2, 0, 2, 1, 1 << 30], np.int32), np.array([3, 1, 0, 4, 2], np.int32)


def grouped_kernel(name: str, result: str, given: dict[str, np.ndarray]) -> np.ndarray:
    """What a program makes that is one call of a kernel of ours."""
    shown = {"float32": "f32", "int32": "s32"}
    lines = [
        f"  {k} = {shown[str(v.dtype)]}{str([*v.shape]).replace(' ', '')} parameter({i})"
        for i, (k, v) in enumerate(given.items())
    ]
    call = f'custom-call({", ".join(f"%{k}" for k in given)}), custom_call_target="__gpu$xla.gpu.triton"'
    text = ["HloModule m", f"ENTRY main () -> {result} {{", *lines, f"  ROOT {name}.1 = {result} {call}", "}"]
    return run("\n".join(text), given.values())[0]


@pytest.mark.parametrize("named", ["", "_gathers", "_scatters", "_gathers_scatters", "_swapped_gathers"])
def test_kernels_of_grouped_rows_gather_and_scatter_them(named):
    random = np.random.default_rng(0)
    rows, weights = (random.normal(size=size).astype(np.float32) for size in ((5, 4), (2, 4, 6)))
    listed = {"sources": SOURCES} if "gathers" in named else {}
    listed |= {"targets": TARGETS} if "scatters" in named else {}
    given = {"rows": rows, "weights": weights.swapaxes(1, 2) if "swapped" in named else weights}
    groups = {"group": np.array([0, 1], np.int32)} | GROUPS_AT
    made = grouped_kernel(f"grouped_product{named}", "f32[5,6]", groups | listed | given)
    taken = rows[SOURCES[:4]] if "gathers" in named else rows[:4]
    wanted = np.concatenate([taken[:3] @ weights[0], taken[3:] @ weights[1]])
    np.testing.assert_allclose(made[TARGETS[:4] if "scatters" in named else slice(4)], wanted, rtol=1e-5)
    assert np.isnan(made).all(1).sum() == 1


@pytest.mark.parametrize("gathers", ["", "rows", "d"])
def test_kernels_of_gradients_by_weights_gather_rows(gathers):
    random = np.random.default_rng(0)
    given = {name: random.normal(size=(5, size)).astype(np.float32) for name, size in (("rows", 4), ("d", 6))}
    listed, name = ({"sources": SOURCES}, f"_gathers_{gathers}") if gathers else ({}, "")
    made = grouped_kernel(f"grouped_gradient{name}_outer_1", "f32[4,2,6]", GROUPS_AT | listed | given)
    rows, d = (x[SOURCES[:4]] if which == gathers else x for which, x in given.items())
    for group, mine in enumerate((slice(0, 3), slice(3, 4))):
        np.testing.assert_allclose(made[:, group], rows[mine].T @ d[mine], rtol=1e-5)


def test_a_query_that_sees_nothing_counts_for_nothing():
    """As in a tile of another document: added to another tile's by the logs of their sums it changes nothing."""
    v = np.random.default_rng(2).normal(size=(1, 1, 3, SIZE)).astype(np.float32)
    scores = np.array([[[[0.5, -np.inf, 1], [-np.inf] * 3]]], np.float32)
    out, log_sum = forward(scores, v)
    assert np.isfinite(out).all() and np.isfinite(log_sum).all() and (out[0, 0, 1] == 0).all()
    assert np.exp(log_sum[0, 0, 1] - log_sum[0, 0, 0]) == 0
    np.testing.assert_allclose(out[0, 0, 0], (v[0, 0, 0] + v[0, 0, 2] * np.exp(0.5)) / (1 + np.exp(0.5)), rtol=1e-6)


def test_what_is_not_known_is_named(given):
    operands = {"q": Q, "k": K, "v": K, "bias": BIAS}
    packed = call(False, f"({OUT}, {LOG_SUM}, u8[0]{{0}})", operands, ',"max_seg_per_batch":4')
    with pytest.raises(NotInterpreted, match="several sequences in a row"):
        run(packed, given)
    broken = packed.replace(',"max_seg_per_batch":4', "").replace('"mask_type"', '"mask"')
    with pytest.raises(Failed, match="custom-call call of .*KeyError 'mask_type'"):
        run(broken, given)
    tuple_ = f"{ADD}\n  x = f32[3]{{0}} parameter(0)\n  pair = (f32[3]{{0}}) tuple(%x)\n"
    with pytest.raises(Failed, match="copy one is .*another kind of value"):
        run(tuple_ + "  ROOT one = f32[3]{0} copy(%pair)\n}\n", [np.zeros(3, np.float32)])


@pytest.mark.slow
def test_the_command_says_what_it_does_not_know(capsys, monkeypatch):
    """In the place of a compiler's new operation: exit code 2 and four parts, no traceback."""
    from trellis.proof.interpreter import machine

    known = {name: make for name, make in machine.OPERATIONS.items() if name != "all-gather"}
    monkeypatch.setattr(machine, "OPERATIONS", known)
    assert main(["prove", "tiny", "--on", "v5e:2x2", "--no-reason"]) == 2
    said = capsys.readouterr().err
    assert "the operation all-gather" in said and "the program of tiny for v5e:2x2" in said
    assert said.count("seen: ") == said.count("where: ") == said.count("fix: ") == 1


LABELS = "b01f_o01i->b01f"


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_of_cudnn(groups):
    """Forward, and both backward, with a stride, unequal padding, and taps that lie apart."""
    x, w = (np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate(_sizes(groups)))
    window = "{size=3x2 stride=2x1 pad=1_2x0_3 rhs_dilate=1x2}"

    def convolved(x, w):
        how = dict(window_strides=(2, 1), padding=[(1, 2), (0, 3)], rhs_dilation=(1, 2), feature_group_count=groups)
        return jax.lax.conv_general_dilated(x, w, **how, dimension_numbers=("NHWC", "OHWI", "NHWC"))

    y, pull = jax.vjp(convolved, x, w)
    d_x, d_w = pull(y)
    calls = {"Forward": ((x, w), y), "BackwardInput": ((y, w), d_x), "BackwardFilter": ((x, y), d_w)}
    for way, (given, wanted) in calls.items():
        (found, workspace) = run(_convolution(way, given, wanted, window, groups), [np.asarray(a) for a in given])
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        assert workspace.size == 0


def _sizes(groups: int) -> tuple[tuple[int, ...], ...]:
    return (2, 6, 5, 4), (6, 3, 2, 4 // groups)


def test_a_convolution_of_cudnn_with_what_follows():
    x, w = (np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate(_sizes(1)))
    given, bias = (x, w, np.arange(6, dtype=np.float32)), np.arange(6, dtype=np.float32)
    y = np.asarray(jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "OHWI", "NHWC")))
    how = '"activation_mode":"kRelu","conv_result_scale":2,"side_input_scale":0'
    found, _ = run(_convolution("BiasActivationForward", given, y, "{size=3x2}", 1, how), given)
    np.testing.assert_allclose(found, np.maximum(2 * y + bias, 0), rtol=1e-4, atol=1e-4)
    how = how.replace("kRelu", "kUnknown")
    with pytest.raises(NotInterpreted, match="with the activation kUnknown"):
        run(_convolution("BiasActivationForward", given, y, "{size=3x2}", 1, how), given)


def _convolution(way, given, wanted, window, groups, how='"activation_mode":"kNone","conv_result_scale":1') -> str:
    """A program that is one call of cuDNN's."""
    type_ = lambda x: f"f32[{','.join(map(str, x.shape))}]"
    lines = [f"  x{i} = {type_(x)} parameter({i})" for i, x in enumerate(given)]
    call = f'custom_call_target="__cudnn$conv{way}", backend_config={{"cudnn_conv_backend_config":{{{how}}}}}'
    attributes = f"window={window}, dim_labels={LABELS}, feature_group_count={groups}, {call}"
    operands = ", ".join(f"%x{i}" for i in range(len(given)))
    result = f"({type_(wanted)}, u8[0]{{0}})"
    return "\n".join(
        ["HloModule m", "ENTRY main () -> f32[] {", *lines]
        + [f"  ROOT call = {result} custom-call({operands}), {attributes}", "}"]
    )


BLOCK_SCALED = """HloModule m
ENTRY main () -> f32[1,128,128] {
  x = f8e4m3fn[1,128,64]{2,1,0} parameter(0)
  y = f8e4m3fn[1,128,64]{2,1,0} parameter(1)
  a = f8e8m0fnu[1,128,4]{2,1,0} parameter(2)
  b = f8e8m0fnu[1,128,4]{2,1,0} parameter(3)
  both = (f32[1,128,128]{2,1,0}, u8[0]{0}) custom-call(%x, %y, %a, %b), custom_call_target="__cudnn$blockScaledDot"
  ROOT out = f32[1,128,128]{2,1,0} get-tuple-element(%both), index=0
}
"""


def test_a_product_of_blocks_with_scales():
    """cuDNN has the scale of row r and block j at place 16 * (r % 32) + 4 * (r // 32) + j of a tile; two of four blocks
    here are padding."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 128, 64)).astype(np.float32)
    tiles = 2.0 ** random.integers(-3, 4, (2, 512)).astype(np.float32)
    rows, blocks = np.arange(128)[:, None], np.arange(64)[None] // 32
    wide = [v * scales[16 * (rows % 32) + 4 * (rows // 32) + blocks] for v, scales in zip((x, y), tiles, strict=True)]
    found = Interpreter(BLOCK_SCALED)([x[None, None], y[None, None], *tiles.reshape(2, 1, 1, 128, 4)])
    np.testing.assert_allclose(found[0][0, 0], wide[0] @ wide[1].T, rtol=2e-5, atol=1e-3)
    with pytest.raises(NotInterpreted, match="blockScaledDot of f8e4m3fn, f8e4m3fn, bf16, bf16"):
        other = BLOCK_SCALED.replace("f8e8m0fnu", "bf16")
        Interpreter(other)([x[None, None], y[None, None], *tiles.reshape(2, 1, 1, 128, 4)])


def test_numbers_of_four_bits_are_not_interpreted():
    with pytest.raises(NotInterpreted, match="numbers of four bits, to which gradients are rounded at random"):
        Interpreter(BLOCK_SCALED.replace("f8e4m3fn", "f4e2m1fn"))([np.zeros((1, 1, 128, 64))] * 4)
