"""The loss in chunks against the formula: values, gradients, meshes, padding."""

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trellis.mesh.meshes import make_mesh
from trellis.named import NamesError, named
from trellis.nn.loss import LossError, formulas
from trellis.nn.loss import linear_cross_entropy as cross_entropy

BATCH, POS, EMBED, VOCAB = 4, 6, 8, 32
CASES = list(itertools.product([0.0, 0.1], [None, 2.0], [None, 29], [False, True]))


@pytest.fixture(scope="module")
def arrays():
    random = np.random.default_rng(0)
    x, unembed = random.normal(size=(BATCH, POS, EMBED)), random.normal(size=(EMBED, VOCAB))
    targets = random.integers(0, 29, (BATCH, POS))
    # Some tokens that are predicted right, so that accuracy is neither 0 nor all.
    targets[0] = np.argmax(x[0] @ unembed[:, :29], axis=-1)
    weights = random.random((BATCH, POS))
    weights[:, 2] = 0
    in_float32 = lambda x: jnp.asarray(x, jnp.float32)
    return in_float32(x), in_float32(unembed), jnp.asarray(targets, jnp.int32), in_float32(weights)


def plain(x, unembed, targets, weights, *, z_loss, logit_softcap, vocab_size, vocab_first):
    logits = x @ (unembed.T if vocab_first else unembed)
    if logit_softcap is not None:
        logits = jnp.tanh(logits / logit_softcap) * logit_softcap
    logits = logits[..., :vocab_size]
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    hit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    entropy, z_sum = jnp.sum(weights * (log_sum - hit)), jnp.sum(weights * z_loss * log_sum**2)
    correct = jnp.sum(jnp.where(jnp.argmax(logits, axis=-1) == targets, weights, 0.0))
    return entropy + z_sum, entropy, z_sum, correct, jnp.sum(weights)


def gradients(function, x, unembed, targets, weights, **settings):
    """Of the mean, whose denominator is the sum of the weights."""

    def mean(x, unembed, weights):
        sums = function(x, unembed, targets, weights, **settings)
        return sums[0] / sums[4], tuple(sums)

    (_, sums), found = jax.value_and_grad(mean, (0, 1, 2), has_aux=True)(x, unembed, weights)
    return sums, found


def with_gradients(function, x, unembed, targets, weights, **settings):
    return jax.jit(lambda *given: gradients(function, *given, **settings))(x, unembed, targets, weights)


def assert_near(seen, wanted):
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-5, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("z_loss,logit_softcap,vocab_size,vocab_first", CASES)
def test_chunks_equal_the_formula(arrays, z_loss, logit_softcap, vocab_size, vocab_first):
    x, unembed, targets, weights = arrays
    unembed = unembed.T if vocab_first else unembed
    settings = dict(z_loss=z_loss, logit_softcap=logit_softcap, vocab_size=vocab_size, vocab_first=vocab_first)

    @jax.jit
    def found(*given):
        chunked = [functools.partial(cross_entropy, chunk=chunk, **settings) for chunk in (None, 8, 7)]
        values = [tuple(function(*given)) for function in chunked]
        return gradients(plain, *given, **settings), [gradients(function, *given) for function in chunked], values

    wanted, each, values = found(x, unembed, targets, weights)
    for chunks, only_values in zip(each, values, strict=True):
        assert_near(chunks, wanted)
        assert_near(only_values, wanted[0])
    assert 0 < wanted[0][3] < wanted[0][4]


@pytest.mark.slow
@pytest.mark.parametrize("vocab_first", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_few_tokens_keep_the_gradient_of_their_logits(vocab_first, with_bias):
    """No more tokens than `embed`: one product for the gradient of `unembed`, and nothing added up over chunks."""
    keys = jax.random.split(jax.random.key(1), 4)
    x, unembed = jax.random.normal(keys[0], (2, 6, 16)), jax.random.normal(keys[1], (16, VOCAB))
    targets, weights = jax.random.randint(keys[2], (2, 6), 0, 29), jax.random.uniform(keys[3], (2, 6))
    bias = {"bias": jnp.linspace(-1.0, 1.0, VOCAB)} if with_bias else {}
    settings = dict(z_loss=0.1, logit_softcap=3.0, vocab_size=29, vocab_first=vocab_first)

    def reference(x, unembed, *rest, **settings):
        if with_bias:  # a bias is a column of ones
            x = jnp.concatenate([x, jnp.ones((2, 6, 1))], -1)
            row = bias["bias"][:, None] if vocab_first else bias["bias"][None]
            unembed = jnp.concatenate([unembed, row], 1 if vocab_first else 0)
        return plain(x, unembed, *rest, **settings)

    unembed = unembed.T if vocab_first else unembed

    @jax.jit
    def found(*given):
        chunked = [functools.partial(cross_entropy, chunk=chunk, **settings, **bias) for chunk in (None, 4, 5)]
        return gradients(reference, *given, **settings), [gradients(function, *given) for function in chunked]

    wanted, each = found(x, unembed, targets, weights)
    for chunks in each:
        assert_near(chunks, wanted)
    grad = jax.grad(lambda u: cross_entropy(x, u, targets, weights, chunk=4, **settings).total)
    products = [line for line in str(jax.make_jaxpr(grad)(unembed)).splitlines() if "dot_general" in line]
    shape = f"f32[{VOCAB},16]" if vocab_first else f"f32[16,{VOCAB}]"
    assert sum(f":{shape} = dot_general" in line for line in products) == 1


@pytest.mark.slow
@pytest.mark.parametrize("place", [None, ("model",), ("data",), (None, "data")], ids=str)
def test_targets_that_are_no_words_have_no_logit(arrays, place):
    """PyTorch's -100, and ids that only a tokenizer has: the same loss however the vocabulary lies."""
    x, unembed, targets, weights = arrays
    wrong = targets.at[0].set(jnp.array([-100, -1, 29, 31, VOCAB, 200])).astype(jnp.int16)
    settings = dict(z_loss=0.1, logit_softcap=4.0, vocab_size=29)

    def without(x, unembed, weights):
        """The formula with word 0 for those that are none, whose logit is added again."""
        known = jnp.where(jnp.arange(BATCH)[:, None] == 0, 0, targets)
        first = jnp.tanh(x[0] @ unembed[0] / 4) * 4
        return plain(x, unembed, known, weights, vocab_first=True, **settings)[0] + jnp.sum(weights[0] * first)

    total = lambda *given: cross_entropy(*given, vocab_first=True, **settings).total
    mesh = make_mesh(data=2, context=2, model=2)
    put = lambda a, *axes: a if place is None else jax.device_put(a, NamedSharding(mesh, P(*axes)))
    for counted in (weights, weights.at[0].set(0.0)):
        wanted = jax.jit(jax.value_and_grad(without, (0, 1, 2)))(x, unembed.T, counted)
        with contextlib.nullcontext() if place is None else jax.set_mesh(mesh):
            given = put(x, "data"), put(unembed.T, *(place or ())), put(wrong, "data"), put(counted, "data")
            assert_near(jax.jit(jax.value_and_grad(total, (0, 1, 3)))(*given), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("vocab_first", [False, True])
def test_a_mesh_computes_what_one_device_does(arrays, vocab_first, copied):
    x, unembed, targets, weights = arrays
    unembed = unembed.T if vocab_first else unembed
    settings = dict(z_loss=0.1, vocab_size=29, vocab_first=vocab_first, logit_softcap=4.0)
    one = with_gradients(cross_entropy, x, unembed, targets, weights, **settings)
    mesh = make_mesh(data=2, context=2, model=2)
    with jax.set_mesh(mesh):
        put = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))
        tokens = ("data", "context")
        across = ("model", None) if vocab_first else (None, "model")

        def function(x, unembed, *rest, **settings):
            if copied:
                x = jax.reshard(x, P(*tokens, None, reduced={"model"}))
                unembed = jax.reshard(unembed, P(*across, reduced=set(tokens)))
            return cross_entropy(x, unembed, *rest, **settings)

        many = with_gradients(
            function, put(x, *tokens), put(unembed, *across), put(targets, *tokens), put(weights, *tokens), chunk=4,
            **settings,
        )  # fmt: skip
    assert_near(many, one)


@pytest.fixture
def in_pairs(monkeypatch):
    """As on a GPU: the largest logit and the sum of exponentials by one reduction."""
    monkeypatch.setattr(formulas, "pairs_at_once", lambda logits: True)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_first", [False, True])
def test_the_largest_and_the_sum_of_one_reduction(arrays, in_pairs, vocab_first):
    x, unembed, targets, weights = arrays
    unembed = unembed.T if vocab_first else unembed
    settings = dict(z_loss=0.1, logit_softcap=2.0, vocab_size=29, vocab_first=vocab_first)
    found = with_gradients(functools.partial(cross_entropy, chunk=7), x, unembed, targets, weights, **settings)
    assert_near(found, with_gradients(plain, x, unembed, targets, weights, **settings))
    text = str(jax.make_jaxpr(lambda *given: cross_entropy(*given, **settings).total)(x, unembed, targets, weights))
    assert "reduce_max" not in text and " reduce[" in text


@pytest.mark.slow
def test_one_reduction_of_each_device_over_a_sliced_vocabulary(arrays, in_pairs):
    """Of 32 columns 12 are words, so that a device of four has none, and another a part."""
    x, unembed, targets, weights = arrays
    settings = dict(z_loss=0.1, vocab_size=12, vocab_first=False, logit_softcap=None)
    wanted = with_gradients(plain, x, unembed, targets % 12, weights, **settings)
    mesh = make_mesh(data=2, model=4)
    with jax.set_mesh(mesh):
        put = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))
        sliced = put(x, "data"), put(unembed, None, "model"), put(targets % 12, "data"), put(weights, "data")
        assert_near(with_gradients(cross_entropy, *sliced, chunk=4, **settings), wanted)


@pytest.mark.slow
def test_one_reduction_has_second_derivatives(arrays, in_pairs, monkeypatch):
    x, unembed, targets, _ = arrays
    along = lambda: jax.jvp(jax.grad(lambda x: cross_entropy(x, unembed, targets).total), (x,), (jnp.cos(x),))[1]
    found = along()
    monkeypatch.undo()
    jax.clear_caches()
    assert_near(found, along())


def test_what_one_reduction_makes_of_numbers_that_are_none():
    inf, nan = jnp.inf, jnp.nan
    logits = jnp.array([[1.0, -inf, 3.0], [-inf, -inf, -inf], [nan, 1.0, 2.0], [1e38, 0.0, -1e38], [inf, 0.0, 1.0]])
    largest, total = formulas._largest_and_sum(logits)
    np.testing.assert_allclose(largest, [3.0, -inf, nan, 1e38, inf])
    np.testing.assert_allclose(total, [1 + np.exp(-2), 3.0, nan, 1.0, 1.0], rtol=1e-6)


@pytest.mark.slow
def test_padded_columns_get_nothing(arrays):
    x, unembed, targets, weights = arrays
    large = unembed.at[:, 29:].set(100.0)
    gradient = jax.grad(lambda u: cross_entropy(x, u, targets, weights, vocab_size=29).total)(large)
    assert np.all(np.asarray(gradient[:, 29:]) == 0)
    wanted = cross_entropy(x, unembed[:, :29], targets, weights)
    assert_near(tuple(cross_entropy(x, large, targets, weights, vocab_size=29)), tuple(wanted))


def test_logits_of_the_whole_batch_never_exist(arrays):
    x, unembed, targets, weights = arrays
    grad = jax.grad(lambda x, u: cross_entropy(x, u, targets, weights, chunk=4).total, (0, 1))
    text = str(jax.make_jaxpr(grad)(x, unembed))
    assert f"f32[4,{VOCAB}]" in text
    assert f"[{BATCH},{POS},{VOCAB}]" not in text and f"[{BATCH * POS},{VOCAB}]" not in text
    assert f"[{BATCH * POS // 4},4,{VOCAB}]" not in text


@pytest.mark.parametrize(
    ("words", "turned"), [(32, ["f32[32,8]", "f32[8,6]"]), (12, ["f32[12,6]"])]
)  # embed 8, four chunks of 6 tokens: 24 * 8 + 32 * 8 < 24 * 32, but 24 * 8 + 12 * 8 = 24 * 12
def test_what_is_least_is_turned_for_the_gradient_of_the_unembedding(words, turned):
    x, unembed, targets = jnp.ones((4, 6, 8)), jnp.ones((words, 8)), jnp.zeros((4, 6), jnp.int32)
    loss = lambda x, u: cross_entropy(x, u, targets, chunk=6, vocab_first=True).total
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, unembed))
    assert sorted(set(re.findall(r"(f32\[\d+,\d+\]) = transpose", text))) == turned


@pytest.mark.slow
def test_low_precision_sums_in_float32(arrays):
    x, unembed, targets, weights = arrays
    low = [a.astype(jnp.bfloat16) for a in (x, unembed)]
    sums, gradients = with_gradients(cross_entropy, *low, targets, weights)
    assert {a.dtype for a in sums} == {jnp.dtype("float32")}
    assert [a.dtype for a in gradients] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    wanted, _ = with_gradients(cross_entropy, *(a.astype(jnp.float32) for a in low), targets, weights)
    np.testing.assert_allclose(sums[0], wanted[0], rtol=1e-4)


def refusal(call) -> str:
    with pytest.raises(LossError) as caught:
        call()
    return str(caught.value)


def test_refusals(arrays):
    x, unembed, targets, weights = arrays
    assert refusal(lambda: cross_entropy(x, unembed.T, targets)) == (
        "x must be 'batch pos embed', unembed 'embed vocab' and targets 'batch pos', got shapes (4, 6, 8), (32, 8), "
        "(4, 6), in linear_cross_entropy(vocab_first=False): reorder the dimensions, or change vocab_first"
    )
    assert refusal(lambda: cross_entropy(x, unembed, targets, weights[0])) == (
        "each token needs a weight, got weights of shape (6,) for targets (4, 6), in "
        "linear_cross_entropy(vocab_first=False): pass weights of the targets' shape"
    )
    assert refusal(lambda: cross_entropy(x, unembed, targets, vocab_size=33)) == (
        "the vocabulary must be from 1 to the size of the unembedding, got vocab_size=33 for 32 columns, in "
        "linear_cross_entropy(vocab_first=False): pass the tokenizer's size, or pad the unembedding further"
    )
    with pytest.raises(NamesError, match=r"takes no names, got f32\[batch=4 pos=6 embed=8\] in linear_.* next_token_l"):
        cross_entropy(named(x, "batch pos embed"), unembed, targets)


@pytest.mark.slow
def test_refused_placements(arrays):
    x, unembed, targets, _ = arrays
    mesh = make_mesh(data=4, model=2)
    with jax.set_mesh(mesh):
        put = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))
        assert refusal(lambda: cross_entropy(put(x, "data"), put(unembed, "model"), put(targets, "data"))) == (
            "embed must be whole in x and unembed, got x float32[4@data,6,8], unembed float32[8@model,32], in "
            "linear_cross_entropy: gather it first with reshard"
        )
        assert refusal(lambda: cross_entropy(put(x, "data"), put(unembed, None, "data"), put(targets, "data"))) == (
            "an unembedding gathered in chunks must be 'vocab embed' (vocab_first), with one dimension sliced, over "
            "mesh axes of the tokens only, and without bias, chunk and tiles of narrow numbers, got x "
            "float32[4@data,6,8], unembed float32[8,32@data], in linear_cross_entropy: gather it first with reshard"
        )
        assert refusal(lambda: cross_entropy(put(x, "data"), put(unembed), put(targets))) == (
            "targets must be sharded like x, got x float32[4@data,6,8], unembed float32[8,32], in "
            "linear_cross_entropy, targets sharded ((), ()): reshard them like x"
        )


@pytest.mark.slow
@pytest.mark.parametrize("logit_softcap", [None, 4.0])
def test_a_bias_is_one_more_row(arrays, logit_softcap):
    """A bias is the weight of an element that is always 1; on a mesh its gradient is summed over tokens too."""
    x, unembed, targets, weights = arrays
    bias = jnp.linspace(-1.0, 1.0, VOCAB)
    settings = dict(z_loss=0.1, vocab_size=29, logit_softcap=logit_softcap, chunk=5)

    def longer(x, head):
        x = jnp.concatenate([x, jnp.ones((BATCH, POS, 1))], axis=-1)
        return cross_entropy(x, jnp.concatenate([head[0], head[1][None]]), targets, weights, **settings).total

    def biased(x, head):
        return cross_entropy(x, head[0], targets, weights, bias=head[1], **settings).total

    wanted = jax.jit(jax.value_and_grad(longer, (0, 1)))(x, (unembed, bias))
    assert_near(jax.jit(jax.value_and_grad(biased, (0, 1)))(x, (unembed, bias)), wanted)
    mesh = make_mesh(data=2, context=2, model=2)
    with jax.set_mesh(mesh):
        put = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))
        tokens = ("data", "context")

        def many(x, head, targets, weights):
            x = jax.reshard(x, P(*tokens, None, reduced={"model"}))
            unembed, bias = (jax.reshard(h, P(*jax.typeof(h).sharding.spec, reduced=set(tokens))) for h in head)
            return cross_entropy(x, unembed, targets, weights, bias=bias, **settings).total

        head = (put(unembed, None, "model"), put(bias, "model"))
        put_tokens = [put(a, *tokens) for a in (targets, weights)]
        found = jax.jit(jax.value_and_grad(many, (0, 1)))(put(x, *tokens), head, *put_tokens)
    assert_near(found, wanted)


def test_refused_biases(arrays):
    x, unembed, targets, _ = arrays
    with pytest.raises(
        LossError, match=r"one number for each column, got shape \(3,\) for 32 columns, in linear_cross_entropy"
    ):
        cross_entropy(x, unembed, targets, bias=jnp.zeros(3))
    mesh = make_mesh(data=4, model=2)
    with jax.set_mesh(mesh):
        put = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))
        with pytest.raises(
            LossError, match=r"like the vocabulary of the unembedding, got bias float32\[32\] for vocab over"
        ):
            cross_entropy(put(x, "data"), put(unembed, None, "model"), put(targets, "data"), bias=put(jnp.zeros(VOCAB)))


@pytest.mark.parametrize("weights", [None, "numpy", "one device", "traced"])
@pytest.mark.parametrize("once", [lambda f: f, jax.jit])
def test_weights_may_be_on_no_mesh(weights, once):
    mesh = make_mesh(data=4, model=2)
    put = lambda a: jax.device_put(a, jax.NamedSharding(mesh, jax.P("data", "model")))
    x, targets = put(jnp.ones((8, 16, 4))), put(jnp.zeros((8, 16), jnp.int32))
    unembed = jax.device_put(jnp.arange(12.0).reshape(4, 3), jax.NamedSharding(mesh, jax.P()))
    halves = np.full((8, 16), 0.5, np.float32)

    def loss(x, unembed, targets):
        given = {
            "numpy": lambda: halves,
            "one device": lambda: jax.device_put(halves, jax.devices()[0]),
            "traced": lambda: jnp.full((8, 16), 0.5),
        }
        mine = given[weights]() if weights else None
        return cross_entropy(x, unembed, targets, mine).total

    whole = jax.tree.map(np.asarray, (x, unembed, targets))
    plain = cross_entropy(*map(jnp.asarray, whole), None if weights is None else halves).total
    np.testing.assert_allclose(once(loss)(x, unembed, targets), plain, rtol=1e-6)


@pytest.mark.parametrize("vocab_first", [False, True])
def test_what_is_no_word_is_never_correct(vocab_first):
    """Also where all logits are below the 0 that stands for its logit."""
    x, unembed = jnp.ones((1, 3, 4)), -jnp.ones((4, 8))
    unembed = unembed.at[:, 2].set(-0.5)
    head = unembed.T if vocab_first else unembed
    for targets, right in (([2, 2, 0], 2), ([2, -100, 8], 1)):
        assert cross_entropy(x, head, jnp.array([targets]), vocab_first=vocab_first).correct == right


@pytest.mark.slow
def test_what_is_no_token_adds_nothing(arrays):
    x, unembed, targets, _ = arrays
    loss = lambda x, unembed: cross_entropy(x, unembed, targets[:0], z_loss=0.1).total
    total, gradients = jax.value_and_grad(loss, (0, 1))(x[:0], unembed)
    assert total == 0 and not gradients[1].any() and gradients[0].shape == (0, *x.shape[1:])


def test_numbers_of_another_kind_are_refused(arrays):
    x, unembed, targets, _ = arrays
    assert refusal(lambda: cross_entropy(x, unembed, targets.astype(float))) == (
        "x and unembed must be floats and targets whole numbers, got float32, float32 and float32, in "
        "linear_cross_entropy(vocab_first=False): cast them, as in targets.astype('int32')"
    )
    assert "got complex64, float32 and int32" in refusal(lambda: cross_entropy(x.astype("complex64"), unembed, targets))
    for chunk in (0, -1, 2.5):
        assert refusal(lambda chunk=chunk: cross_entropy(x, unembed, targets, chunk=chunk)) == (
            f"a chunk must have one token or more, got chunk={chunk}, in linear_cross_entropy(vocab_first=False): use "
            "512 or so, or None"
        )
