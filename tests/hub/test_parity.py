"""Every family against `transformers`, with random weights, in float32, and both ways through folders."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small import CONFIGS, POSITIONS, VOCAB
from trellis.hub import Folder, write_folder
from trellis.hub.keys import key_of
from trellis.models import FAMILIES
from trellis.named import einsum, named
from trellis.nn.parameters import parameters

# Forms of a family that differ in what parameters there are, beside those that all tests take.
FORMS = CONFIGS | {
    "gemma3_near": dataclasses.replace(CONFIGS["gemma3"], layers=3, global_every=None),
    "deepseek_v3_queries": dataclasses.replace(CONFIGS["deepseek_v3"], q_latent=None, dense_layers=0, layers=2),
}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 24))


@pytest.fixture(scope="module")
def torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return torch


@pytest.fixture(params=FORMS)
def config(request):
    return FORMS[request.param]


@pytest.fixture
def theirs(torch, config, tmp_path):
    """Their model with random weights, biases and norms included, and the folder that they saved it to."""
    from transformers import AutoConfig, AutoModelForCausalLM

    contents = FAMILIES[config.family].to_config_json(config, positions=POSITIONS, dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        described = AutoConfig.for_model(**contents)
        model = AutoModelForCausalLM.from_config(described, attn_implementation="eager").eval()
        with torch.no_grad():
            for weight in (*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith(BIAS))):
                weight.add_(0.1 * torch.randn_like(weight))
        model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    return model, tmp_path / "theirs"


def logits(model, tokens):
    out = einsum("batch pos embed, vocab embed -> batch pos vocab", model(tokens).hidden, model.unembedding)
    bias = model.unembedding_bias
    return out if bias is None else out + bias


def loss(model, tokens):
    """The sum of squared logits: a gradient for every parameter."""
    out = logits(model, tokens)
    return (out * out).mean().array, out


def part_of(parameter, at):
    return np.asarray(parameter.leaf.array)[at]


# What an expert's three weights are called, and what their mixture is.
_PLAIN = "mlp", "gate_proj", "up_proj", "down_proj"
SAVED = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3_moe": _PLAIN, "deepseek_v3": _PLAIN}


# What only picks experts, and has no gradient.
BIAS = "e_score_correction_bias"


def as_saved(model):
    """Their gradients under the names that their folders have: newer versions hold all experts of a layer in one."""
    together = model.config.model_type not in SAVED  # in folders too, if there are any
    mixture, *names = SAVED.get(model.config.model_type, ("mlp", "", "", ""))
    for name, weight in model.named_parameters():
        grad, parts = weight.grad.numpy(), {}
        if together:
            pass
        elif name.endswith("experts.gate_up_proj"):
            parts = dict(zip(names[:2], np.split(grad, 2, axis=1), strict=True))
        elif name.endswith("experts.down_proj"):
            parts = {names[2]: grad}
        for which, whole in parts.items():
            for i, one in enumerate(whole):
                yield f"model.layers.{name.split('.')[2]}.{mixture}.experts.{i}.{which}.weight", one
        if not parts:
            yield name.replace(".mlp.gate.weight", f".{mixture}.gate.weight"), grad


@pytest.mark.slow
def test_logits_gradients_and_folders(torch, config, theirs, tmp_path):
    model, folder = theirs
    found = Folder(folder, FAMILIES)
    assert found.config == config
    ours = found.load(jax.eval_shape(lambda: config.init(key=jax.random.key(0))))

    out = model(torch.from_numpy(TOKENS)).logits
    (out * out).mean().backward()
    tokens = named(jnp.asarray(TOKENS, jnp.int32), "batch pos")
    (_, mine), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(ours, tokens)
    np.testing.assert_allclose(mine.array, out.detach().numpy(), atol=1e-4)

    grads = dict(as_saved(model))
    family = FAMILIES[config.family]
    for p in parameters(gradients):
        key = key_of(family.keys_of(config), p)
        names = p.names[key.counts :]
        for at in np.ndindex(*p.leaf.array.shape[: key.counts]):
            text, mine = key.name(at), part_of(p, at)
            if text.endswith(BIAS):
                assert not mine.any()
                continue
            sizes = dict(zip(names, mine.shape, strict=True))
            theirs = key.read(grads[text], sizes, names, {name: slice(0, size) for name, size in sizes.items()})
            np.testing.assert_allclose(mine, theirs, atol=1e-3, rtol=1e-3, err_msg=text)

    files = write_folder(tmp_path / "ours", family, config, ours, part_of, positions=POSITIONS, shard_bytes=20_000)
    assert sum(f.suffix == ".safetensors" for f in files) > 1
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_experts_that_are_stored_together(name, torch, tmp_path):
    """As newer versions hold them, where they are asked to write them so."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = CONFIGS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        contents = FAMILIES[config.family].to_config_json(config, positions=POSITIONS, dtype="float32")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**contents))
        model.save_pretrained(tmp_path / "apart")
        model.save_pretrained(tmp_path / "together", save_original_format=False)
    target = jax.eval_shape(lambda: config.init(key=jax.random.key(0)))
    apart, together = (Folder(tmp_path / how, FAMILIES) for how in ("apart", "together"))
    assert not set(apart._place) == set(together._place)
    for a, b in zip(*(jax.tree.leaves(f.load(target)) for f in (apart, together)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_what_an_uneven_load_costs(name, torch, tmp_path):
    """In a model of one layer: `transformers` takes the product of means over all layers, not each layer's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dataclasses.replace(CONFIGS[name], layers=1, experts_per_token=3)
    contents = FAMILIES[config.family].to_config_json(config, positions=POSITIONS, dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**contents, output_router_logits=True)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.5 * torch.randn_like(weight))
            theirs = float(model(torch.from_numpy(TOKENS)).aux_loss)
        model.save_pretrained(tmp_path / "theirs")
    folder = Folder(tmp_path / "theirs", FAMILIES)
    ours = folder.load(jax.eval_shape(lambda: folder.config.init(key=jax.random.key(0))))
    mine = jax.jit(lambda model, tokens: model(tokens).measured.balance)(
        ours, named(jnp.asarray(TOKENS, jnp.int32), "batch pos")
    )
    loss = folder.config.routing.balance * float(mine) / TOKENS.size
    assert loss == pytest.approx(contents["router_aux_loss_coef"] * theirs, rel=1e-5) != 0.02
