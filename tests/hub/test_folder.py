"""Folders without torch: the format, slices, memory, and what is refused."""

import dataclasses
import errno
import json
import math
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models.small import CONFIGS, POSITIONS, VOCAB
from trellis.errors import UserError
from trellis.hub import Folder, copy_tokenizer, write_folder, write_tokenizer
from trellis.hub.family import family_in
from trellis.hub.keys import Key, key_of
from trellis.hub.tensors import Tensor, TensorFile, write_tensors
from trellis.mesh import Layout, make_mesh
from trellis.models import FAMILIES, GPTJConfig, LlamaConfig, YarnScaling
from trellis.named import NamesError, abstract
from trellis.nn.parameters import parameters


def part_of(parameter, at):
    return np.asarray(parameter.leaf.array)[at]


def numbered(model):
    """The model with every element another number, so that one in a wrong place shows."""
    leaves, tree = jax.tree.flatten(model)
    starts = np.cumsum([0, *(leaf.size for leaf in leaves)])
    counted = [jnp.arange(s, s + x.size, dtype=x.dtype).reshape(x.shape) for x, s in zip(leaves, starts)]
    return jax.tree.unflatten(tree, counted)


def test_the_format_is_the_packages(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5).astype(ml_dtypes.bfloat16),
        "c": np.zeros((0, 3), np.float16),
        "d": np.array(7, np.int64),
    }
    tensors = [Tensor(name, x.shape, x.dtype, lambda x=x: x) for name, x in arrays.items()]
    write_tensors(tmp_path / "ours.safetensors", tensors)
    save_file(arrays, tmp_path / "theirs.safetensors")
    found = load_file(tmp_path / "ours.safetensors")
    read = TensorFile(tmp_path / "theirs.safetensors")
    for name, x in arrays.items():
        for y in (found[name], read.tensor(name)):
            assert y.dtype == x.dtype
            np.testing.assert_array_equal(y, x)
    large = Tensor("e", (2,), np.dtype(np.float16), lambda: np.array([np.inf, -7e4], np.float32))
    with pytest.raises(UserError, match=r"written in\.\n  seen:  7e\+04 in e, where float16 ends at 65,504"):
        write_tensors(tmp_path / "large.safetensors", [large])
    assert not (tmp_path / "large.safetensors").exists()


def test_a_key_reads_any_part():
    sizes = {"embed": 6, "heads": 4, "head_dim": 3}
    whole = np.arange(72).reshape(12, 6)
    key = Key("q", "(heads head_dim) embed")
    names = ("embed", "heads", "head_dim")
    full = {n: slice(0, s) for n, s in sizes.items()}
    array = key.read(whole, sizes, names, full)
    np.testing.assert_array_equal(array, whole.reshape(4, 3, 6).transpose(2, 0, 1))
    np.testing.assert_array_equal(key.write(array, names), whole)
    part = {"embed": slice(2, 4), "heads": slice(1, 3), "head_dim": slice(1, 2)}
    np.testing.assert_array_equal(key.read(whole, sizes, names, part), array[2:4, 1:3, 1:2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj", "qwen3", "mixtral"])
def test_onto_a_mesh(name, tmp_path, monkeypatch):
    """Every device gets what it holds, read once for all that hold it; the vocabulary is cut off and padded again."""
    config = CONFIGS[name]
    model = numbered(config.init(key=jax.random.key(0), vocab_multiple=64))
    write_folder(tmp_path, FAMILIES[config.family], config, model, part_of, positions=POSITIONS)
    folder = Folder(tmp_path, FAMILIES)
    assert all(VOCAB in folder._tensor(k, t[1]).shape for k, t in entries(folder) if "wte" in k or "embed_tok" in k)

    reads = []
    read = Key.read
    monkeypatch.setattr(Key, "read", lambda self, *args: reads.append((self.text, read(self, *args))) or reads[-1][1])
    mesh = make_mesh(jax.devices()[:4], data=2, model=2)
    sliced = {
        "experts": "model",
        "vocab": "model",
        "heads": "model",
        "kv_heads": "model",
        "mlp": "model",
        "embed": "data",
    }
    with Layout(mesh, sliced, {}):
        target = abstract(jax.eval_shape(lambda: config.init(key=jax.random.key(0), vocab_multiple=32)))
        found = folder.load(target)
    assert [x.sharding for x in jax.tree.leaves(found)] == [x.sharding for x in jax.tree.leaves(target)]
    for p, q in zip(parameters(found), parameters(model), strict=True):
        a, b = np.asarray(p.leaf.array), np.array(q.leaf.array)
        if "vocab" in p.names:
            b = b[:VOCAB]
            assert not a[VOCAB:].any() and len(a) == 64
            a = a[:VOCAB]
        np.testing.assert_array_equal(a, b, err_msg=p.path)
    distinct = sum(len({str(i) for i in x.sharding.devices_indices_map(x.shape).values()}) * layers(p)
                   for p, x in ((p, p.leaf.array) for p in parameters(found)))  # fmt: skip
    assert len(reads) == distinct


def layers(parameter):
    """How many tensors a device reads for its slice of a parameter: one a layer, and one an expert of it."""
    held = parameter.leaf.array.sharding.shard_shape(parameter.leaf.array.shape)
    return math.prod(n for name, n in zip(parameter.names, held, strict=True) if name in ("layers", "experts"))


def entries(folder):
    return [(k, e) for file in folder._files.values() for k, e in file.entries.items()]


@pytest.mark.slow
def test_memory_is_bounded_by_a_tensor(tmp_path):
    """Writing and reading 16 layers of which each tensor has 256 KiB."""
    sizes = dict(vocab=64, embed=256, layers=16, heads=4, kv_heads=4, head_dim=64, mlp=256)
    config = LlamaConfig(**sizes, rope_theta=1e4, tie_embeddings=True)
    model = jax.eval_shape(lambda: config.init(key=jax.random.key(0)))
    one, whole = 256 * 256 * 4, 7 * 16 * 256 * 256 * 4

    def made(parameter, at):
        return np.ones(parameter.leaf.array.shape[len(at) :], np.float32)

    tracemalloc.start()
    write_folder(tmp_path, FAMILIES[config.family], config, model, made, positions=64, shard_bytes=4 * one)
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    found = Folder(tmp_path, FAMILIES).load(model)
    read = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(found))
    assert written < 4 * one < whole / 10 and read < 8 * one < whole / 10


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_come_back(name):
    config = CONFIGS[name]
    family = FAMILIES[config.family]
    hub = json.loads(json.dumps(family.to_config_json(config, positions=POSITIONS, dtype="float32")))
    assert family_in(FAMILIES, hub, "config.json") is family
    assert family.from_config_json(hub, "config.json") == config
    if isinstance(scaling := getattr(config, "rope_scaling", None), YarnScaling):  # whose factor transformers 4 divides
        short = family.to_config_json(config, positions=8, dtype="float32")
        assert short["max_position_embeddings"] == scaling.factor * scaling.original_context
    old = {k: v for k, v in hub.items() if k != "rope_parameters"}  # as transformers 4 writes it
    assert family.from_config_json(old, "config.json") == config


@pytest.mark.slow
def test_a_bias_that_the_model_has_not(tmp_path):
    config = GPTJConfig(vocab=61, embed=16, layers=1, heads=2, rotary_dim=4, mlp=32)
    write_folder(tmp_path, FAMILIES[config.family], config, config.init(key=jax.random.key(0)), part_of, positions=8)
    found = Folder(tmp_path, FAMILIES)
    assert found.config.head_bias
    model = found.load(jax.eval_shape(lambda: found.config.init(key=jax.random.key(0))))
    assert model.unembedding_bias.shape == {"vocab": 61} and not model.unembedding_bias.array.any()


@pytest.mark.slow
def test_names_without_the_models_prefix(tmp_path):
    """OpenAI's GPT-2 names its tensors `h.0...`, not `transformer.h.0...`."""
    config = CONFIGS["gpt2"]
    model = numbered(config.init(key=jax.random.key(0)))
    (weights, _) = write_folder(tmp_path, FAMILIES[config.family], config, model, part_of, positions=POSITIONS)
    arrays = {name.removeprefix("transformer."): x for name, x in load_file(weights).items()}
    save_file(arrays, weights)
    found = Folder(tmp_path, FAMILIES).load(model)
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (found, model)), strict=True))


def test_tokenizers_go_along(tmp_path):
    files = write_tokenizer("{}", "<end>", tmp_path / "a", positions=8)
    assert json.loads(files[1].read_text())["eos_token"] == "<end>"
    assert [f.name for f in copy_tokenizer(tmp_path / "a", tmp_path / "b")] == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"


@pytest.fixture
def good(tmp_path):
    """A small folder."""
    config = CONFIGS["llama"]
    write_folder(
        tmp_path / "hf",
        FAMILIES[config.family],
        config,
        config.init(key=jax.random.key(0)),
        part_of,
        positions=POSITIONS,
    )
    return tmp_path / "hf"


def change(folder, **fields):
    hub = json.loads((folder / "config.json").read_text())
    hub = {k: v for k, v in (hub | fields).items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(hub))


MISTYPED = "The configuration of a llama must have values of the types that transformers writes.\n  seen:  "


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(model_type="bert"),
            "An imported model must be of a family that Trellis knows.\n  seen:  model_type",
        ),
        (dict(hidden_act="gelu"), "A llama must have hidden_act silu here.\n  seen:  hidden_act: gelu"),
        (dict(hidden_size=...), "The configuration of a llama must be complete.\n  seen:  no hidden_size"),
        (
            dict(rope_parameters={"rope_type": "longrope"}),
            "Rotary scaling must be of a known type.\n  seen:  rope_type: longrope",
        ),
        (dict(model_type=["llama"]), "An imported model must be of a family that Trellis knows."),
        (dict(num_hidden_layers="2"), f"{MISTYPED}layers: '2', which is no int"),
        (dict(tie_word_embeddings="false"), f"{MISTYPED}tie_embeddings: 'false', which is no bool"),
        (dict(num_attention_heads="four", head_dim=None), f"{MISTYPED}unsupported operand"),
        (dict(rope_parameters=[5]), f"{MISTYPED}'list' object is not a mapping"),
    ],
)
def test_refused_configurations(good, fields, message):
    change(good, **fields)
    with pytest.raises(UserError) as error:
        Folder(good, FAMILIES)
    assert str(error.value).startswith(message)


@pytest.mark.slow
def test_refused_folders(good, tmp_path):
    target = jax.eval_shape(lambda: CONFIGS["llama"].init(key=jax.random.key(0)))

    def refused(message):
        with pytest.raises(UserError) as error:
            Folder(good, FAMILIES).load(target)
        assert str(error.value).startswith(message)
        return error.value.fix

    with pytest.raises(UserError, match=r"must have a config\.json\.\n  seen:  no such folder"):
        Folder(tmp_path / "nowhere", FAMILIES)
    (good / "adapter_config.json").write_text("{}")  # transformers reads both, where peft is installed
    assert "merge_and_unload" in refused("A Hugging Face folder must have the weights of a whole model, not what an")
    (good / "adapter_config.json").unlink()
    with pytest.raises(
        UserError,
        match=r"An export needs a folder without another model, tokenizer or run\.\n  seen:  model\.safetensors",
    ):
        write_folder(good, FAMILIES[CONFIGS["llama"].family], CONFIGS["llama"], target, part_of, positions=POSITIONS)
    weights = good / "model.safetensors"
    arrays = load_file(weights)
    save_file({k: v for k, v in arrays.items() if k != "lm_head.weight"}, weights)
    fix = refused("The folder must have every parameter of its model.\n  seen:  no lm_head.weight")
    assert fix.endswith('or set "tie_word_embeddings": true in config.json, if it is the table of tokens')
    save_file({k: v for k, v in arrays.items() if "norm" not in k}, weights)
    fix = refused(
        "The folder must have every parameter of its model.\n  seen:  no model.layers.0.input_layernorm.weight"
    )
    assert fix == "use config.json and weights of one model"
    save_file(arrays | {"lm_head.weight": np.zeros((8, 32), np.float32)}, weights)
    refused("Weights must have the shapes that config.json sets.\n  seen:  lm_head.weight of shape (8, 32)")
    save_file(arrays | {"lm_head.weight": arrays["lm_head.weight"].astype(np.int8)}, weights)
    refused("Imported weights must be stored in bfloat16, float16, float32 or float64.\n  seen:  lm_head.weight in I8")
    index = good / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(arrays, weights.name)}))
    save_file({k: v for k, v in arrays.items() if k != "lm_head.weight"}, weights)
    refused("A file of weights must have the tensors that the index lists.\n  seen:  no lm_head.weight")
    index.write_text(json.dumps({"weight_map": {name: f"{i}.safetensors" for i, name in enumerate(arrays)}}))
    weights.rename(good / "0.safetensors")
    rest = len(arrays) - 4
    refused(
        "A folder must have the weight files that its index names.\n  seen:  no 1.safetensors, 10.safetensors, "
        f"11.safetensors and {rest} more\n  where: {index}"
    )
    (good / "0.safetensors").rename(weights)
    for contents in ("{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}'):
        index.write_text(contents)
        refused("An index of weight files must have a weight_map.")
    index.write_text("[]")
    refused("The folder's .json files must be valid JSON, an object each.\n  seen:  []")
    save_file(arrays, weights)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(arrays, "model-00001-of-00001.safetensors")}))
    refused("A Hugging Face folder must have one set of weights.")
    index.unlink()
    data = weights.read_bytes()
    weights.write_bytes(data[:-10])
    refused(f"A weight file must be complete.\n  seen:  {len(data) - 10} of {len(data)} bytes")
    weights.write_bytes(data + b"more")
    refused(f"A weight file must be complete.\n  seen:  {len(data) + 4} of {len(data)} bytes")
    weights.write_bytes(b"PK\x03\x04 a pickle, for instance")
    refused("A weight file must be in the safetensors format.")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2948\n")
    fix = refused("A weight file must be in the safetensors format.\n  seen:  a pointer of Git LFS to the file")
    assert fix == "get the file itself: run `git lfs pull` in its folder"
    weights.unlink()
    refused("Weights must be in safetensors: pickles are never read.")
    for contents in ("{", "[]", "null"):
        (good / "config.json").write_text(contents)
        refused("The folder's .json files must be valid JSON, an object each.")


def test_weights_of_float64_are_rounded(good):
    target = jax.eval_shape(lambda: CONFIGS["llama"].init(key=jax.random.key(0)))
    arrays = load_file(good / "model.safetensors")
    name, fine = "model.norm.weight", np.float64(1) + np.arange(32) * 2.0**-30
    save_file({k: v.astype(np.float64) for k, v in arrays.items()} | {name: fine}, good / "model.safetensors")
    found = Folder(good, FAMILIES).load(target)
    np.testing.assert_array_equal(found.norm.scale.array, fine.astype(np.float32))
    np.testing.assert_array_equal(found.embedding.array, arrays["model.embed_tokens.weight"])
    save_file({k: v.astype(np.float64) for k, v in arrays.items()} | {name: fine * 1e300}, good / "model.safetensors")
    with pytest.raises(UserError, match=f"32 of 32 numbers of {name} are not finite in float32"):
        Folder(good, FAMILIES).load(target)


@pytest.mark.slow
def test_weights_that_are_not_finite(good):
    """In the folder, or in the type that they are to have here."""
    target = jax.eval_shape(lambda: CONFIGS["llama"].init(key=jax.random.key(0)))
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float16), target)
    weights, name = good / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    arrays = load_file(weights)

    def refused(number, like):
        changed = arrays[name].copy()
        changed[2, 3] = number
        save_file(arrays | {name: changed}, weights)
        with pytest.raises(UserError, match=r"^Imported weights must be finite\.") as error:
            Folder(good, FAMILIES).load(like)
        assert error.value.where == str(weights)
        return error.value

    seen = f"1 of {arrays[name].size} numbers of {name} are not finite in"
    assert refused(np.nan, target).seen == f"{seen} float32, such as nan"
    assert refused(-np.inf, target).seen == f"{seen} float32, such as -inf"
    large = refused(1e6, half)
    assert large.seen == f"{seen} float16, such as inf" and "--precision.params float32" in large.fix


@pytest.mark.parametrize("damage", ["short", "shared", "negative", "text", "shape"])
def test_a_header_that_contradicts_itself(good, damage):
    """Its tensor's numbers would be those of another."""
    weights, name = good / "model.safetensors", "lm_head.weight"
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start, stop = header[name]["data_offsets"]
    changes = {
        "short": {"data_offsets": [start, stop - 64]},
        "shared": {"data_offsets": [64, 64 + stop - start]},
        "negative": {"data_offsets": [start - stop, 0]},
        "text": {"data_offsets": [str(start), str(stop)]},
        "shape": {"shape": [float(size) for size in header[name]["shape"]]},
    }
    header[name] |= changes[damage]
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(UserError, match="A weight file must be in the safetensors format") as error:
        Folder(good, FAMILIES)
    if damage in ("short", "shared"):
        assert "bytes at" in error.value.seen and "after a tensor that ends at" in error.value.seen


def test_tensors_that_no_parameter_takes(good):
    """Buffers that are made from the configuration, a copy of what is tied, and layers for further tokens may be there;
    what else there is would change what the model computes."""
    target = jax.eval_shape(lambda: CONFIGS["llama"].init(key=jax.random.key(0)))
    weights, hub = good / "model.safetensors", json.loads((good / "config.json").read_text())
    arrays, one = load_file(weights), np.ones(4, np.float32)

    def load(more, **fields):
        save_file(arrays | dict.fromkeys(more, one), weights)
        (good / "config.json").write_text(json.dumps(hub | fields))
        folder = Folder(good, FAMILIES)
        folder.load(target)
        return folder.left_out

    assert load(["model.layers.0.self_attn.rotary_emb.inv_freq"]) == 0
    further = [f"model.layers.{hub['num_hidden_layers']}.{name}" for name in ("eh_proj.weight", "mlp.up_proj.weight")]
    assert load(further, num_nextn_predict_layers=1) == 2
    for more, seen in (
        (further, ", ".join(further)),
        (["model.layers.0.self_attn.q_proj.bias"], "model.layers.0.self_attn.q_proj.bias"),
        (["a", "b", "c", "d"], "a, b, c and 1 more"),
    ):
        with pytest.raises(UserError, match="Every tensor in the folder must be a parameter of its model") as error:
            load(more)
        assert error.value.seen == seen


def test_an_unembedding_beside_a_tied_one(good):
    config = dataclasses.replace(CONFIGS["llama"], tie_embeddings=True)
    target = jax.eval_shape(lambda: config.init(key=jax.random.key(0)))
    change(good, tie_word_embeddings=True)
    arrays = load_file(good / "model.safetensors")
    with pytest.raises(UserError, match="A model whose unembedding is tied must have only one token table") as error:
        Folder(good, FAMILIES).load(target)
    assert error.value.seen == "lm_head.weight differs from model.embed_tokens.weight"
    save_file(arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"]}, good / "model.safetensors")
    assert Folder(good, FAMILIES).load(target).head is None


@pytest.mark.slow
def test_refused_exports(tmp_path):
    config = GPTJConfig(vocab=61, embed=16, layers=1, heads=2, rotary_dim=4, mlp=32, rope_theta=5e5)
    with pytest.raises(UserError, match=r"frequencies of base 10000\.\n  seen:  rope_theta=500000"):
        FAMILIES["gptj"].to_config_json(config, positions=8, dtype="float32")
    (first, *_) = parameters(config.init(key=jax.random.key(0)))
    with pytest.raises(NamesError, match="needs a key with its dimensions, got embedding of 'vocab embed'"):
        key_of({"embedding": Key("wte", "vocab mlp")}, first)


def test_an_export_without_room_names_its_file_and_leaves_no_weights(tmp_path):
    config = GPTJConfig(vocab=61, embed=16, layers=1, heads=2, rotary_dim=4, mlp=32, rope_theta=1e4)
    model = jax.eval_shape(lambda: config.init(key=jax.random.key(0)))

    def full(parameter, at):
        if parameter.path != "embedding":
            raise OSError(errno.ENOSPC, "No space left on device")
        return np.zeros(parameter.leaf.array.shape, np.float32)[at]

    with pytest.raises(OSError) as error:
        write_folder(tmp_path / "a", FAMILIES["gptj"], config, model, full, positions=8, shard_bytes=5_000)
    assert ".safetensors" in error.value.filename and list((tmp_path / "a").iterdir()) == []
