"""Sampling: with a cache as without one, on meshes too, and never from the vocabulary's padding."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small import CONFIGS, VOCAB
from trellis.errors import UserError
from trellis.mesh import Layout, make_mesh
from trellis.models.generate import Sampling, _run, choose, generate, sample
from trellis.named import abstract, einsum, named, named_jit, shard

GREEDY = Sampling(temperature=0)
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (2, 7)).tolist()
FAMILIES = [
    "llama3",
    "mistral",
    "qwen3",
    "olmo2",
    "gemma3",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "gpt2_mistral",
    "gptj",
]


@functools.cache
def model_of(name):
    return random_model(CONFIGS[name])


def random_model(config):
    """Random everywhere."""
    random = np.random.default_rng(0)
    start = jax.eval_shape(lambda: config.init(key=jax.random.key(0), vocab_multiple=8))
    return jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.2, x.shape), x.dtype), start)


@functools.cache
def continued(name):
    """Greedily, on one device."""
    return generate(model_of(name), PROMPTS, new_tokens=6, sampling=GREEDY, key=jax.random.key(0))


def recomputed(model, rows, count):
    """Greedy continuation without a cache: the whole text again for every token."""
    rows = [list(row) for row in rows]
    length = len(rows[0])

    @jax.jit
    def logits(tokens):
        out = einsum("batch pos embed, vocab embed -> batch pos vocab", model(tokens).hidden, model.unembedding)
        return (out if model.unembedding_bias is None else out + model.unembedding_bias).array

    for i in range(count):
        padded = [row + [0] * (count - i) for row in rows]  # later tokens change nothing: one compilation
        out = np.asarray(logits(named(np.array(padded, np.int32), "batch pos")))
        for row, now in zip(rows, out[:, length + i - 1, :VOCAB]):
            row.append(int(np.argmax(now)))
    return [row[length:] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_cache_is_exact(name):
    assert continued(name) == recomputed(model_of(name), PROMPTS, 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "mixtral", "deepseek_v3", "gptj"])
def test_on_a_mesh(name):
    """Sliced batch, heads, widths and vocabulary; positions, which come one by one, are whole whatever the layout."""
    model, expected = model_of(name), continued(name)
    tensor = {"experts": "data", "vocab": "model", "heads": "model", "kv_heads": "model", "mlp": "model"}
    mesh = make_mesh(jax.devices()[:4], data=2, model=2)
    with Layout(mesh, tensor | {"embed": "data"}, tensor | {"batch": "data", "pos": "model"}):
        placed = shard(model, "params")
        assert generate(placed, PROMPTS, new_tokens=6, sampling=GREEDY, key=jax.random.key(0)) == expected
        if name in ("llama3", "mixtral"):  # one sequence, which no mesh axis slices
            one = generate(placed, PROMPTS[:1], new_tokens=6, sampling=GREEDY, key=jax.random.key(0))
            assert one == expected[:1]


@pytest.mark.slow
def test_where_positions_are_dealt_out():
    """As in a training loop of one's own: a prompt has its positions in their order all the same."""
    wanted, ring = continued("llama3"), dict(compute={"pos": "context"}, context={"context": "ring"}, dealt="context")
    with Layout(make_mesh(data=4, context=2), {"embed": "data"}, **ring):
        made = generate(shard(model_of("llama3")), PROMPTS, new_tokens=6, sampling=GREEDY, key=jax.random.key(0))
    assert made == wanted


@pytest.mark.slow
def test_experts_with_a_capacity_drop_of_a_prompt_what_they_drop_of_its_tokens():
    """A prompt that is padded for fewer compilations would have the room of a longer one."""
    config = CONFIGS["mixtral"]
    tight = dataclasses.replace(config, routing=dataclasses.replace(config.routing, capacity=0.5))
    model = random_model(tight)
    hidden = model(named(np.array(PROMPTS, np.int32), "batch pos")).hidden["pos", -1]
    logits = einsum("batch embed, vocab embed -> batch vocab", hidden, model.unembedding).array[:, :VOCAB]
    made = generate(model, PROMPTS, new_tokens=1, sampling=GREEDY, key=jax.random.key(0))
    assert [row[0] for row in made] == np.argmax(logits, 1).tolist()
    assert [row[0] for row in made] != [row[0] for row in continued("mixtral")]


@pytest.mark.slow
def test_on_a_mesh_of_stages():
    """Layers that are sliced for a pipeline are gathered."""
    model, expected = model_of("llama3"), continued("llama3")
    mesh = make_mesh(jax.devices()[:4], stage=2, data=2)
    with Layout(mesh, {"layers": "stage", "embed": "data"}, {"layers": "stage", "batch": ("data", "stage")}):
        placed = shard(model, "params")
        assert generate(placed, PROMPTS, new_tokens=6, sampling=GREEDY, key=jax.random.key(0)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("sliced", [False, True])
def test_a_token_writes_its_place_in_the_cache_and_copies_none_of_it(sliced):
    layout = Layout(make_mesh(other=4, model=2), compute={"heads": "model", "kv_heads": "model"}) if sliced else None
    with layout or contextlib.nullcontext():
        start = functools.partial(CONFIGS["llama3"].init, key=jax.random.key(0), vocab_multiple=8)
        model = abstract(jax.eval_shape(start)) if sliced else jax.eval_shape(start)
        prompt, length = jax.ShapeDtypeStruct((2, 64), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        program = named_jit(_run, static=(4, 5, 6))
        compiled = program.lower(model, prompt, length, jax.random.key(0), 13, GREEDY, (), None).compile().as_text()
    config = CONFIGS["llama3"]
    one = f"2,77,{config.kv_heads // (2 if sliced else 1)},{config.head_dim}"
    assert f"f32[{config.layers},{one}]" in compiled
    assert not re.search(rf"f32\[({config.layers}|1),{one}\]\S* (copy|concatenate)\(", compiled)


@pytest.mark.slow
def test_padding_is_never_chosen():
    """Rows of padding with by far the largest logits."""
    model = model_of("llama")
    head = model.head.with_array(model.head.array.at[VOCAB:].set(1e3))
    model = type(model)(model.embedding, model.layers, model.norm, head, model.config)
    assert model.head.shape["vocab"] > VOCAB
    for sampling in (GREEDY, Sampling(temperature=5.0)):
        rows = generate(model, PROMPTS, new_tokens=20, sampling=sampling, key=jax.random.key(1))
        assert all(token < VOCAB for row in rows for token in row)


@pytest.mark.slow
def test_choices():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]] * 4000))

    def seen(**how):
        tokens = choose(logits, jax.random.key(0), Sampling(**how))
        return np.bincount(tokens, minlength=4) / len(tokens)

    np.testing.assert_allclose(seen(), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(seen(top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(seen(top_p=0.8), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(seen(top_p=0.81), [0.526, 0.316, 0.158, 0], atol=0.03)
    np.testing.assert_allclose(seen(top_p=0.01), [1, 0, 0, 0])
    np.testing.assert_allclose(seen(temperature=0), [1, 0, 0, 0])
    np.testing.assert_allclose(seen(temperature=0.5), np.array([25, 9, 2.25, 0.25]) / 36.5, atol=0.03)


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-30])
def test_the_smallest_temperatures_take_the_likeliest(temperature):
    logits = jax.random.normal(jax.random.key(0), (8, 50)).at[:, 3].set(-jnp.inf) * 30
    for more in ({}, {"top_k": 5, "top_p": 0.9}):
        tokens = choose(logits, jax.random.key(1), Sampling(temperature=temperature, **more))
        np.testing.assert_array_equal(tokens, jnp.argmax(logits, -1))


def test_the_largest_temperatures_choose_from_what_is_allowed():
    logits = jnp.array([[3.0, -jnp.inf, 1.0, -jnp.inf]] * 100)
    for temperature in (1e38, jnp.inf):
        tokens = choose(logits, jax.random.key(0), Sampling(temperature=temperature))
        assert set(tokens.tolist()) == {0, 2}


class Letters:
    """A tokenizer of the letters from A on; A ends a document."""

    end_of_document = 0

    def encode_markup(self, text):
        return [ord(c) - 65 for c in text]

    def decode(self, ids):
        return "".join(chr(65 + i) for i in ids)


@pytest.mark.slow
def test_texts():
    model = model_of("gpt2")
    again = [sample(model, Letters(), "HELLO", new_tokens=40, seed=3, count=3) for _ in range(2)]
    assert again[0] == again[1] and len(set(again[0])) == 3
    assert all(text.startswith("HELLO") and "A" not in text for text in again[0])
    assert sample(model, Letters(), "HELLO", new_tokens=40, seed=4, count=3) != again[0]
    assert "A" not in sample(model, Letters(), "", new_tokens=5)[0]
    (full,) = sample(model, Letters(), "B" * 60, new_tokens=9, sampling=GREEDY)  # of 64 positions
    assert 60 <= len(full) <= 64


class Words(Letters):
    """Letters of which N to Z are A to M with a space before them, as in a byte-level BPE."""

    def encode_markup(self, text):
        return [ord(c[-1]) - 65 + 13 * (len(c) > 1) for c in re.findall(r" ?[A-M]| ", text)]

    def decode(self, ids):
        return "".join(" " * (i >= 13) + chr(65 + i % 13) for i in ids)


@pytest.mark.slow
def test_a_prompt_that_ends_in_a_space_goes_on_with_a_token_that_begins_with_one():
    texts = sample(model_of("gpt2"), Words(), "BED ", new_tokens=5, count=20, sampling=Sampling(temperature=3.0))
    assert all(re.match("BED [A-M]", text) for text in texts) and len(set(texts)) > 10


def test_which_tokens_begin_with_a_space_is_found_once_for_a_tokenizer(monkeypatch):
    class Counted(Words):
        decoded = 0

        def decode(self, ids):
            self.decoded += 1
            return super().decode(ids)

    monkeypatch.setattr("trellis.models.generate.generate", lambda model, prompts, **_: [[1]] * len(prompts))
    tokenizer, model = Counted(), model_of("gpt2")
    for prompt in ("BED ", "BAD ", "BED"):
        sample(model, tokenizer, prompt, new_tokens=1, count=2)
    assert tokenizer.decoded == model.config.vocab + 3 * 2


@pytest.mark.slow
def test_a_document_ends():
    """Where the end is all but certain, every text is cut there, and rows stay ended."""
    model = model_of("gptj")
    bias = model.unembedding_bias
    model = jax.tree.map(lambda x: x, model)
    object.__setattr__(model, "unembedding_bias", bias.with_array(bias.array.at[0].set(1e4)))
    assert sample(model, Letters(), "HELLO", new_tokens=9, count=2) == ["HELLO", "HELLO"]
    rows = generate(model, PROMPTS, new_tokens=9, sampling=GREEDY, key=jax.random.key(0), stop=[0])
    assert rows == [[0] * 9] * 2
    # Of several tokens that end a text any does, and the rest of a row is the first of them.
    object.__setattr__(model, "unembedding_bias", bias.with_array(bias.array.at[7].set(1e4)))
    assert sample(model, Letters(), "HELLO", new_tokens=9, count=2, ends=[7]) == ["HELLO", "HELLO"]
    rows = generate(model, PROMPTS, new_tokens=9, sampling=GREEDY, key=jax.random.key(0), stop=[0, 7])
    assert rows == [[7] + [0] * 8] * 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(temperature=-1.0), "`temperature` must be 0 or more.\n  seen:  temperature=-1.0"),
        (dict(top_k=0), "`top_k` must be 1 or more.\n  seen:  top_k=0"),
        (dict(top_p=0.0), "`top_p` must be above 0 and at most 1.\n  seen:  top_p=0.0"),
    ],
)
def test_refused_settings(how, message):
    with pytest.raises(UserError) as error:
        Sampling(**how)
    assert str(error.value).startswith(message)


def test_refused_prompts():
    model = model_of("gpt2")
    with pytest.raises(UserError, match=r"the same number of tokens, at least one\.\n  seen:  lengths \[1, 2\]"):
        generate(model, [[1], [1, 2]], new_tokens=1, sampling=GREEDY, key=jax.random.key(0))
    with pytest.raises(
        UserError, match=r"learned positions\.\n  seen:  7 tokens of prompt and 58 new ones, positions=64"
    ):
        generate(model, PROMPTS, new_tokens=58, sampling=GREEDY, key=jax.random.key(0))
    with pytest.raises(UserError, match=r"fix:   give a prompt of 63 tokens or fewer"):
        generate(model, [[1] * 64], new_tokens=1, sampling=GREEDY, key=jax.random.key(0))
    with pytest.raises(
        UserError, match=r"at least one token\.\n.*nothing of it\n.*\n  fix:   give a prompt with words"
    ):
        generate(model, [[], []], new_tokens=1, sampling=GREEDY, key=jax.random.key(0))
    for token in (VOCAB, -1):
        with pytest.raises(UserError, match=rf"vocabulary\.\n  seen:  token {token}, vocab={VOCAB}"):
            generate(model_of("llama3"), [[0, token]], new_tokens=1, sampling=GREEDY, key=jax.random.key(0))
