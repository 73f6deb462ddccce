"""`config.json` as others write it: fields left out, and fields that change what a model computes."""

import copy
import dataclasses
import warnings

import pytest

from tests.models.small import CONFIGS, POSITIONS
from trellis.errors import UserError
from trellis.hub import Family
from trellis.models import FAMILIES, LinearScaling, YarnScaling

# Configurations by what `transformers` calls their family.
BY_TYPE = {FAMILIES[config.family].model_type: config for config in CONFIGS.values()}


def family_of(kind: str) -> Family:
    return FAMILIES[BY_TYPE[kind].family]


def contents(kind: str) -> dict:
    return family_of(kind).to_config_json(BY_TYPE[kind], positions=POSITIONS, dtype="float32")


def read(kind: str, hub: dict):
    return family_of(kind).from_config_json(hub, "folder/config.json")


def refused(kind: str, hub: dict) -> UserError:
    with pytest.raises(UserError) as raised:
        read(kind, hub)
    return raised.value


@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_TYPE)
def test_a_field_that_is_left_out(kind):
    """It is taken as `transformers` takes it, or the folder is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoConfig

        whole = contents(kind)
        for field in (*whole, "both places of rotary positions"):
            left = {name for name in whole if name.startswith("rope_")} if " " in field else {field}
            if field == "model_type":
                continue
            hub = {name: value for name, value in whole.items() if name not in left}
            if field == "num_key_value_heads":  # what each of them takes is at most 32
                hub |= {"hidden_size": 64, "num_attention_heads": 64}
            try:
                found = read(kind, hub)
            except UserError as error:
                known = "must be complete" in error.rule or "must say the same in both" in error.rule
                assert known or field.endswith("_pdrop"), (field, str(error))
                continue
            theirs = AutoConfig.for_model(**copy.deepcopy(hub)).to_dict() | {"architectures": None}
            if rope := theirs.get("rope_parameters"):  # names that only older versions have
                theirs |= {"rope_theta": rope.get("full_attention", rope)["rope_theta"]}
            assert found == read(kind, theirs), field


@pytest.mark.parametrize(
    ("kind", "field", "names"),
    [
        ("llama", "hidden_act", ["silu", "swish"]),
        ("gpt2", "activation_function", ["gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"]),
        ("gemma3_text", "hidden_activation", ["gelu_pytorch_tanh", "gelu_new", "gelu_python_tanh"]),
    ],
)
def test_names_of_one_activation(kind, field, names):
    for name in names:
        assert read(kind, contents(kind) | {field: name}) == BY_TYPE[kind]
    for other in ("gelu", "relu", ["silu"]):
        error = refused(kind, contents(kind) | {field: other})
        assert error.seen == f"{field}: {other}" and error.fix == f"use a model with {field} {names[0]}"


@pytest.mark.parametrize(
    ("kind", "fields", "seen"),
    [
        ("llama", {"head_dim": 0}, "head_dim=0"),
        ("qwen3", {"num_key_value_heads": 0}, "kv_heads=0"),
        ("mixtral", {"head_dim": False}, "head_dim: False, which is no int"),
        ("gpt2", {"n_inner": 0}, "mlp=0"),
        ("llama", {"rope_theta": "1e4", "rope_parameters": None}, "rope_theta: '1e4', which is no float"),
        ("olmo2", {"rope_parameters": {"rope_theta": True}}, "rope_theta: True, which is no float"),
    ],
)
def test_what_is_no_size_and_no_number(kind, fields, seen):
    """It is not taken for a field that is left out, nor a text for the number that it shows."""
    assert refused(kind, contents(kind) | fields).seen == seen


def test_an_imported_model_that_is_refused():
    """The message names the file, and advises nothing that an import does not take."""
    error = refused("mixtral", contents("mixtral") | {"num_experts_per_tok": 1})
    assert error.rule.startswith("Normalized weights need two experts per token or more")
    assert error.where == "folder/config.json, as model.experts_per_token"
    assert error.fix == "use another model, since an import has its folder's configuration"
    assert refused("llama", contents("llama") | {"sliding_window": 8}).where == "folder/config.json"


@pytest.mark.parametrize("kind", BY_TYPE)
def test_models_that_see_ahead(kind):
    error = refused(kind, contents(kind) | {"is_causal": False})
    assert error.rule == f"A {kind} must have is_causal True here." and error.seen == "is_causal: False"
    assert read(kind, contents(kind) | {"is_causal": True}) == BY_TYPE[kind]


@pytest.mark.parametrize("kind", BY_TYPE)
def test_what_training_drops(kind):
    """An import says which shares it does not drop; what they are does not change the model."""
    family, names = family_of(kind), [name for name in contents(kind) | family_of(kind).dropped if "drop" in name]
    shares = dict.fromkeys(names, 0.25)
    own = {"resid_pdrop", "embd_pdrop"} if kind == "gpt2" else set()
    assert family.dropped_in(contents(kind)) == {}
    assert family.dropped_in(shares) == {name: 0.25 for name in names if name not in own} != {}
    assert read(kind, contents(kind) | dict.fromkeys(family.dropped, 0.25)) == BY_TYPE[kind]
    for wrong in ("0.1", 1.5, [0.1]):
        error = refused(kind, contents(kind) | {names[-1]: wrong} | dict.fromkeys(own, 0.0))
        assert error.seen == f"{names[-1]}: {wrong!r}, which is no share from 0 to 1"
    if own:
        assert family.dropped_in({}) == {"attn_pdrop": 0.1}
        assert read(kind, contents(kind) | shares).dropout == 0.25
        error = refused(kind, contents(kind) | {"embd_pdrop": 0.25})
        assert error.rule.startswith("A GPT-2 must drop the same share after its table")
        assert error.seen == "embd_pdrop: 0.25, resid_pdrop: 0.0"


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_weight_of_an_even_load(kind):
    """The loss of `transformers` is, with an even load, the number of a token's experts; ours is 1."""
    whole = contents(kind)
    assert BY_TYPE[kind].routing.balance == 0.02 and whole["router_aux_loss_coef"] == 0.01
    assert read(kind, whole | {"num_experts_per_tok": 3}).routing.balance == pytest.approx(0.03)
    whole.pop("router_aux_loss_coef")
    assert read(kind, whole).routing.balance == pytest.approx(0.002)


def test_no_layers_without_experts():
    """To `transformers` a list that is null is empty."""
    whole = contents("qwen3_moe")
    assert read("qwen3_moe", whole | {"mlp_only_layers": None}) == BY_TYPE["qwen3_moe"]
    assert refused("qwen3_moe", whole | {"mlp_only_layers": [1]}).seen == "mlp_only_layers: [1]"


@pytest.mark.parametrize("kind", BY_TYPE)
def test_layers_that_differ(kind):
    error = refused(kind, contents(kind) | {"per_layer_config": {"0": {"intermediate_size": 8}}})
    assert error.rule == f"A {kind} must have per_layer_config None here."


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_a_window_that_only_caches_heed(kind):
    """`transformers` trains such a model on all keys, and keeps those of the window when it generates."""
    for name in ("sliding_window", "attention_chunk_size"):
        error = refused(kind, contents(kind) | {name: 8})
        assert error.rule == "Every layer must attend to all earlier positions here." and error.seen == f"{name}: 8"
    assert read("qwen3", contents("qwen3") | {"sliding_window": 4096}) == BY_TYPE["qwen3"]  # `use_sliding_window` false


def test_parts_of_heads_that_are_not_rotated():
    plain = {name: value for name, value in contents("llama").items() if not name.startswith("rope_")}
    for more in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        error = refused("llama", plain | more)
        assert error.rule == "Rotary positions must rotate whole heads here."
        assert error.seen == "partial_rotary_factor: 0.5"
    assert read("llama", plain | {"partial_rotary_factor": 1.0}).rope_scaling is None


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_layers_that_see_a_window(kind):
    whole = contents(kind)
    assert read(kind, whole | {"layer_types": ["full_attention"] * 2}) == BY_TYPE[kind]
    for kinds in (["full_attention", "sliding_attention"], "sliding_attention"):
        error = refused(kind, whole | {"layer_types": kinds})
        assert error.rule == "Every layer must attend to all earlier positions here."
        assert error.seen == "layer_types: sliding_attention"


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_layers_that_see_a_window_from_one_on(kind):
    """A window that no layer has, or that is not there, changes nothing."""
    whole = contents(kind)
    assert whole["use_sliding_window"] is False
    used = whole | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    for hub in (used, used | {"max_window_layers": 1, "sliding_window": None}, whole | {"use_sliding_window": True}):
        assert read(kind, hub) == BY_TYPE[kind]
    assert read(kind, used | {"max_window_layers": 0, "layer_types": ["full_attention"] * 2}) == BY_TYPE[kind]
    error = refused(kind, used | {"max_window_layers": 1})
    assert error.rule == "Every layer must attend to all earlier positions here."
    assert error.seen == "use_sliding_window: True, max_window_layers: 1 of 2"


def test_rotary_positions_of_versions_4_and_5():
    """Both may be there, as in folders that Trellis writes, if they agree."""
    plain = {name: value for name, value in contents("qwen3").items() if not name.startswith("rope_")}
    newer = plain | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    linear = {"type": "linear", "factor": 2.0}
    for hub in (
        plain | {"rope_theta": 5000.0, "rope_scaling": linear},
        plain | {"rope_theta": 5000.0, "rope_scaling": linear, "rope_parameters": linear},
    ):
        found = read("qwen3", hub)
        assert found.rope_scaling == LinearScaling(factor=2.0) and found.rope_theta == 5000.0
    assert read("qwen3", newer).rope_theta == 5000.0
    error = refused("qwen3", newer | {"rope_scaling": linear})
    assert error.rule == "A config.json that has both rope_scaling and rope_parameters must say the same in both."
    assert error.seen == "rope_type: linear in rope_scaling, default in rope_parameters"
    for more, seen in (
        ({"rope_theta": 500.0}, "rope_theta: 10000.0 beside rope_scaling, 500.0 in rope_parameters"),
        ({"attention_factor": 2.0}, "attention_factor: None beside rope_scaling, 2.0 in rope_parameters"),
    ):
        assert refused("qwen3", plain | {"rope_scaling": linear, "rope_parameters": linear | more}).seen == seen
    error = refused("qwen3", plain | {"rope_parameters": {"full_attention": newer["rope_parameters"]}})
    assert error.seen == "rotary positions of several kinds"


def test_the_length_before_scaling_is_the_models_if_no_other_is_named():
    plain = {name: value for name, value in contents("llama").items() if not name.startswith("rope_")}
    hub = plain | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert read("llama", hub).rope_scaling == YarnScaling(factor=4.0, original_context=POSITIONS)
    hub |= {"original_max_position_embeddings": 16}
    assert read("llama", hub).rope_scaling == YarnScaling(factor=4.0, original_context=16)
    both = hub | {"rope_scaling": hub["rope_scaling"] | {"original_max_position_embeddings": 32}}
    error = refused("llama", both)
    assert error.rule.startswith("A config.json that has original_max_position_embeddings twice must have the same")
    assert error.seen == "32 in rope_scaling, 16 beside it"
    assert read("llama", both | {"original_max_position_embeddings": 32}).rope_scaling.original_context == 32


@pytest.mark.parametrize(
    ("more", "magnitude", "part"),
    [
        ({}, 1.1386, 0.0),
        ({"mscale": 0.7}, 1.1386, 0.0),
        ({"mscale": 0.7, "mscale_all_dim": 0.4}, 1.0394, 0.4),
        ({"mscale_all_dim": 1.0}, 1.1386, 1.0),  # it scales scores by itself, and cosines only beside `mscale`
        ({"mscale_all_dim": 1.0, "attention_factor": 1.2}, 1.2, 1.0),
    ],
)
def test_how_scores_grow_by_yarn(more, magnitude, part):
    plain = {name: value for name, value in contents("deepseek_v3").items() if not name.startswith("rope_sc")}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "original_max_position_embeddings": 16}
    found = read("deepseek_v3", plain | {"rope_parameters": rope | more}).rope_scaling
    assert found.magnitude == pytest.approx(magnitude, abs=1e-4) and found.mscale_all_dim == part
    error = refused("deepseek_v3", plain | {"rope_parameters": rope | {"factor": 1.0, "attention_factor": 1.3}})
    assert error.rule == "YaRN with a factor of 1 must leave queries and keys as they are."


@pytest.mark.parametrize(("mscale", "part", "written"), [(0.0, 1.0, True), (0.7, 1.0, False), (0.7, 0.0, True)])
def test_a_yarn_without_a_growth_of_its_own_comes_back(mscale, part, written):
    """To transformers a zero is no number: it would take the growth of YaRN's paper, and not divide it."""
    scaling = YarnScaling(factor=4.0, original_context=16, mscale=mscale, mscale_all_dim=part)
    config = dataclasses.replace(CONFIGS["llama"], rope_scaling=scaling)
    hub = FAMILIES["llama"].to_config_json(config, positions=POSITIONS, dtype="float32")
    assert hub["rope_parameters"].get("attention_factor") == (scaling.magnitude if written else None)
    back = read("llama", hub).rope_scaling
    assert back.magnitude == pytest.approx(scaling.magnitude) and back.mscale == pytest.approx(mscale)


@pytest.mark.parametrize(
    ("quantized", "seen"),
    [({"quant_method": "fp8"}, "fp8"), ({}, "None"), ("int8", "int8"), ([8], "[8]"), (False, "False")],
)
def test_quantized_weights(quantized, seen):
    error = refused("llama", contents("llama") | {"quantization_config": quantized})
    assert error.rule == "Imported weights must be stored in bfloat16, float16, float32 or float64."
    assert error.seen == f"quantization_config: {seen}"


def test_a_gemmas_layers_and_positions():
    """Windows in the pattern that its configuration says, and two kinds of positions, in either version's places."""
    whole = contents("gemma3_text")
    far, near = "full_attention", "sliding_attention"
    assert whole["layer_types"] == [near, far, near, far, near]
    older = {name: value for name, value in whole.items() if name not in ("layer_types", "rope_parameters")}
    assert read("gemma3_text", older) == BY_TYPE["gemma3_text"]
    assert read("gemma3_text", older | {"rope_local_base_freq": 5000.0}).local_rope_theta == 5000.0
    for hub in (whole | {"layer_types": [near] * 5}, older | {"sliding_window_pattern": 6}):
        assert read("gemma3_text", hub) == dataclasses.replace(BY_TYPE["gemma3_text"], global_every=None)
    for kinds in ([near, far, far, near, far], [far, near, near, near, near], far):
        error = refused("gemma3_text", whole | {"layer_types": kinds})
        assert error.rule == "If a layer of a Gemma 3 sees everything, so must every so many layers one more."
    scaled = {far: whole["rope_parameters"][far], near: {"rope_type": "linear", "factor": 2.0}}
    error = refused("gemma3_text", whole | {"rope_parameters": scaled})
    assert error.seen == "rope_type: linear of sliding_attention"
    for ropes in (5, "linear", {far: 5}, {near: {"rope_theta": "1e4"}}):
        assert "types that transformers writes" in refused("gemma3_text", whole | {"rope_parameters": ropes}).rule
    with pytest.raises(UserError, match=r"seen:  layers=5, global_every=6"):
        dataclasses.replace(BY_TYPE["gemma3_text"], global_every=6)


def test_a_mistrals_window():
    whole = contents("mistral")
    assert read("mistral", whole | {"sliding_window": None}).window is None
    assert read("mistral", {name: value for name, value in whole.items() if name != "sliding_window"}).window == 4096
    near, far = (whole | {"layer_types": [kind] * 2} for kind in ("sliding_attention", "full_attention"))
    assert read("mistral", near) == BY_TYPE["mistral"]
    assert read("mistral", far | {"sliding_window": None}).window is None
    for hub, seen in (
        (far, "layer_types: full_attention; sliding_window: 6"),
        (near | {"sliding_window": None}, "layer_types: sliding_attention; sliding_window: None"),
    ):
        error = refused("mistral", hub)
        assert error.rule.startswith("The layers of a Mistral must all see its window") and error.seen == seen


@pytest.mark.parametrize("kind", ["gpt2", "gptj"])
def test_fields_that_have_two_names(kind):
    """`transformers` takes the other name's value, whatever the field itself has."""
    whole = contents(kind)
    renamed = {name: value for name, value in whole.items() if name != "n_head"}
    assert read(kind, renamed | {"num_attention_heads": whole["n_head"]}) == BY_TYPE[kind]
    error = refused(kind, whole | {"num_attention_heads": 1})
    assert error.rule == f"In a {kind} num_attention_heads and n_head are names of one field and must have one value."
    assert error.seen == f"num_attention_heads: 1, n_head: {whole['n_head']}"


def test_scores_of_a_deepseek_that_grow_without_yarn():
    plain = {name: value for name, value in contents("deepseek_v3").items() if not name.startswith("rope_sc")}
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    assert read("deepseek_v3", plain | {"rope_parameters": rope}).rope_scaling == LinearScaling(factor=2.0)
    error = refused("deepseek_v3", plain | {"rope_parameters": rope | {"mscale_all_dim": 0.7}})
    assert error.seen == "mscale_all_dim: 0.7, rope_type: linear"


def test_a_gpt_oss_whose_layers_are_no_pairs():
    """With or without `layer_types`, which alternate however many layers there are."""
    odd = {**contents("gpt_oss"), "num_hidden_layers": 3}
    for kinds in (None, ["sliding_attention", "full_attention", "sliding_attention"]):
        error = refused("gpt_oss", odd | {"layer_types": kinds})
        assert error.rule.startswith("`layers` must be even") and error.seen == "layers=3"


@pytest.mark.parametrize("kind", BY_TYPE)
def test_layers_that_no_model_has_are_not_counted_out(kind):
    field = "n_layer" if "n_layer" in contents(kind) else "num_hidden_layers"
    for name in (field, "num_nextn_predict_layers"):
        error = refused(kind, {**contents(kind), name: 10**30})
        assert error.rule == f"The configuration of a {kind} must have at most 100,000 layers."
        assert error.seen == f"{name}: {10**30}"
