import re
from pathlib import Path

import pytest
import yaml

from trellis.errors import UserError
from trellis.optim import WSD, Lion
from trellis.recipes import tiny
from trellis.run.config import BatchSize, Profile, Run
from trellis.run.data import MixturePart, MixtureSource, StoreSource
from trellis.run.help import help_text
from trellis.run.overrides import resolve
from trellis.run.schema import fields_of, plain, show


def over(**options: str) -> Run:
    return resolve(Run, tiny(), options={name.replace("__", "."): text for name, text in options.items()})


def test_scalars_of_every_kind():
    run = over(
        mesh__model="2",
        optimizer__learning_rate="3e-4",
        data__mask_documents="false",
        clip_norm="null",
        ema="0.99",
        remat__policy="none",
        layout__compute__pos="model",
        precision__exceptions__norm="bfloat16",
        logging__trackers="tensorboard,wandb",
        remat__names="",
    )
    assert (run.mesh.model, run.optimizer.learning_rate, run.data.mask_documents) == (2, 3e-4, False)
    assert (run.clip_norm, run.ema, run.remat.policy, run.remat.names) == (None, 0.99, "none", ())
    assert run.layout.compute == {"pos": "model"} and run.precision.exceptions == {"norm": "bfloat16"}
    assert run.logging.trackers == ("tensorboard", "wandb")


def test_a_field_that_is_null_becomes_a_value_of_its_type():
    assert tiny().profile is None
    assert over(profile__start="3").profile == Profile(start=3, steps=2)
    assert over(profile="null").profile is None


def test_lists_in_yaml_and_by_place():
    assert over(batch_size="[{step: 0, size: 8}, {step: 5, size: 16}]").batch_size == (
        BatchSize(step=0, size=8),
        BatchSize(step=5, size=16),
    )
    options = {
        "data.source": "{kind: mixture, parts: [{name: a, path: x, weight: 1}, {name: b, path: y, weight: 2}]}",
        "data.source.parts.1.weight": "0.5",
    }
    source = resolve(Run, tiny(), options=options).data.source
    assert isinstance(source, MixtureSource) and [p.weight for p in source.parts] == [1.0, 0.5]


def test_another_variant_keeps_only_what_it_has_no_default_for():
    run = over(optimizer__kind="lion", optimizer__learning_rate="1e-4", schedule="wsd", schedule__decay_steps="3")
    assert run.optimizer == Lion(learning_rate=1e-4)
    assert run.schedule == WSD(warmup_steps=tiny().schedule.warmup_steps, decay_steps=3)
    assert over(optimizer="lion").optimizer == Lion(learning_rate=tiny().optimizer.learning_rate)
    assert over(data__source__kind="store", data__source__path="s").data.source == StoreSource(path="s")


def test_a_file_replaces_parts_and_options_replace_both():
    patch = {"steps": 7, "mesh": {"model": 2}, "optimizer": {"learning_rate": 1}}
    run = resolve(Run, tiny(), patch=patch, source="f.yaml", options={"steps": "9"})
    assert (run.steps, run.mesh.model, run.mesh.data) == (9, 2, -1)
    assert run.optimizer.learning_rate == 1.0 and run.optimizer.beta2 == tiny().optimizer.beta2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer.lerning_rate": "1"},
            [
                "`optimizer` has no field of this name.",
                "`lerning_rate`",
                "--optimizer.lerning_rate",
                "did you mean `--optimizer.learning_rate`?",
            ],
        ),
        (
            {"learning_rate": "1"},
            [
                "`Run` has no field of this name.",
                "`learning_rate`",
                "--learning_rate",
                "did you mean `--optimizer.learning_rate`?",
            ],
        ),
        (
            {"data.source.path": "corpus.zarr"},
            [
                "`data.source` has no field of this name.",
                "`path`",
                "--data.source.path",
                "it is a field if --data.source.kind is store: set that too",
            ],
        ),
        (
            {"step": "1"},
            ["`Run` has no field of this name.", "`step`", "--step", "did you mean `--steps`?"],
        ),
        (
            {"modle.embed": "1"},
            ["`Run` has no field of this name.", "`modle`", "--modle.embed", "did you mean `--model.embed`?"],
        ),
        (
            {"network.embed": "1"},
            ["`Run` has no field of this name.", "`network`", "--network.embed", "did you mean `--model.embed`?"],
        ),
        (
            {"logging.trackers": "wandb,tensorboard,wandb"},
            [
                "`logging.trackers` must have each of its words once.",
                "wandb twice",
                "--logging.trackers",
                "leave one of them out",
            ],
        ),
        (
            {"remat.policy": "saved", "remat.names": "query,query"},
            [
                "`remat.names` must have each of its words once.",
                "query twice",
                "--remat.names",
                "leave one of them out",
            ],
        ),
        (
            {"steps": "4,8"},
            ["`steps` must be of type int.", "'4,8' (str)", "--steps", "write a whole number, as in 8"],
        ),
        (
            {"steps": "many"},
            ["`steps` must be of type int.", "'many' (str)", "--steps", "write a whole number, as in 8"],
        ),
        (
            {"optimizer": "adamx"},
            [
                "`optimizer` must be of type adamw | lion | muon | adafactor.",
                "'adamx' (str)",
                "--optimizer",
                "did you mean `adamw`?",
            ],
        ),
        (
            {"schedule": "wsd"},
            [
                "A field without a default must be set.",
                "no `schedule.decay_steps`",
                "--schedule",
                "add --schedule.decay_steps (int)",
            ],
        ),
        (
            {"data.source.kind": "mixture"},
            [
                "A field without a default must be set.",
                "no `data.source.parts`",
                "--data.source.kind",
                "add --data.source.parts ([{name: str, path: str, weight: float or "
                "[{step: int, weight: float}, ...]}, ...])",
            ],
        ),
        (
            {"model.family": "gpt2"},
            [
                "A field without a default must be set.",
                "no `model.positions`, `model.dropout`, `model.scale_by_inverse_layer`, `model.upcast_attention`",
                "--model.family",
                "add --model.positions (int), --model.dropout (float), --model.scale_by_inverse_layer (bool), "
                "--model.upcast_attention (bool)",
            ],
        ),
        ({"batch_size": "0"}, ["`batch_size` must be 1 or more.", "batch_size=0", "--batch_size", "use 1 or more"]),
        (
            {"seed.x": "1"},
            [
                "`seed` is of type int, which has no field of this name.",
                "`x`",
                "--seed.x",
                "set the whole value: --seed int",
            ],
        ),
        (
            {"logging.trackers": "wndb"},
            [
                "`logging.trackers.0` must be one of tensorboard | wandb.",
                "'wndb' (str)",
                "--logging.trackers",
                "did you mean `wandb`?",
            ],
        ),
        (
            {"layout.compute.pos": "modl"},
            [
                "A layout entry must map a name to mesh axes.",
                "pos: modl",
                "--layout.compute.pos",
                "did you mean `model`?",
            ],
        ),
        (
            {"layout.compute.batch": "data model"},
            [
                "A layout entry must map a name to mesh axes.",
                "batch: data model",
                "--layout.compute.batch",
                "write data/model",
            ],
        ),
        (
            {"microbatches": "3"},
            [
                "The number of microbatches must divide the batch size.",
                "batch_size=8, microbatches=3",
                "--microbatches",
                "use a multiple of 3, as in 9, or --microbatches that divide the batch",
            ],
        ),
        (
            {"model.heads": "3"},
            [
                "`heads` must be divisible by `kv_heads`.",
                "heads=3, kv_heads=2",
                "--model.heads",
                "make kv_heads a divisor of 3, or heads a multiple of 2",
            ],
        ),
        (
            {"schedule.warmup_steps": "21"},
            [
                "The schedule's warmup and decay must fit into the run.",
                "schedule.warmup_steps=21, steps=20",
                "--schedule.warmup_steps",
                "use --steps 21 or more, or shorten schedule.warmup_steps",
            ],
        ),
        (
            {"data.source": "{kind: store, path: stores/a}", "data.source.validation": ""},
            [
                "The path of a token store cannot be empty.",
                "validation=''",
                "--data.source.validation",
                "name a token store, or use null for none",
            ],
        ),
        (
            {"optimizer": "muon", "optimizer.update_rms": "-1"},
            ["The size of an update must be positive.", "update_rms=-1.0", "--optimizer.update_rms", "use 0.2"],
        ),
        (
            {"profile.steps": "3"},
            [
                "A field without a default must be set.",
                "no `profile.start`",
                "--profile.steps",
                "add --profile.start (int)",
            ],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(UserError) as error:
        resolve(Run, tiny(), options=options)
    rule, seen, where, fix = message
    assert str(error.value) == f"{rule}\n  seen:  {seen}\n  where: {where}\n  fix:   {fix}"


def test_a_message_names_the_file():
    with pytest.raises(UserError) as error:
        resolve(Run, tiny(), patch={"optimizer": {"beta3": 1}}, source="f.yaml")
    assert error.value.where == "`optimizer.beta3` in f.yaml"
    assert error.value.fix == "did you mean `beta2` or `beta1`?"


def test_help_has_every_field_with_its_value_and_doc():
    text = help_text(tiny())
    assert "  --optimizer.learning_rate  <float>  [0.01]\n      Peak learning rate. Change it first of all: " in text
    assert (
        "  --optimizer.kind  <adamw | lion | muon | adafactor>  [adamw]\n      lion has learning_rate, beta1," in text
    )
    assert "  --profile  <{start, steps} or null>  [null]\n      A trace of some steps; null takes none. Set it" in text
    assert "mesh: Devices along each mesh axis.\n  --mesh.replica  <int>  [1]\n" in text
    undocumented = [
        a
        for a, b in zip(text.splitlines(), text.splitlines()[1:], strict=False)
        if a.startswith("  --") and b.startswith("  --")
    ]
    assert not undocumented


def test_what_is_inside_of_a_new_kinds_field_is_as_the_kind_has_it():
    """DeepSeek-V3 picks experts by sigmoids, also where an option or a file says something else about its routing."""
    needed = "dense_layers q_latent kv_latent nope_dim rope_dim value_dim dense_mlp shared_mlp experts_per_token"
    sizes = {"family": "deepseek_v3", "layers": 3, "experts": 4} | dict.fromkeys(needed.split(), 2)
    options = {f"model.{name}": str(size) for name, size in sizes.items()}
    patch = {"model": sizes | {"routing": {"balance": 0.01}}}
    alone = {**plain(tiny()), "model": {"vocab": 512, "embed": 64, "heads": 4, "mlp": 64} | patch["model"]}
    alone["model"] |= {"rope_theta": 1e4, "tie_embeddings": True}
    for run in (
        resolve(Run, tiny(), options=options | {"model.routing.balance": "0.01"}),
        resolve(Run, tiny(), patch=patch, source="f.yaml"),
        resolve(Run, patch=alone, source="f.yaml"),
    ):
        assert (run.model.routing.scores, run.model.routing.balance) == ("sigmoid", 0.01)


def test_help_has_the_fields_of_the_kind_that_an_option_picks():
    text = help_text(tiny(), {"model.family": "deepseek_v3", "model.heads": "6"})
    assert "  --model.kv_latent  <int>  [required]\n      Width that a token's keys and values are made from." in text
    assert "  --model.layers  <int>  [2]\n" in text and "  --model.heads  <int>  [6]\n" in text
    assert "  --model.routing.scores  <softmax | sigmoid>  [sigmoid]\n" in text and "--model.kv_heads" not in text
    assert "      llama has vocab, embed, layers," in text and "deepseek_v3 has" not in text


def test_help_has_the_fields_of_a_lists_entries():
    source = {"kind": "mixture", "parts": [{"name": "web", "path": "stores/web", "weight": 1.0}]}
    text = " ".join(help_text(resolve(Run, tiny(), patch={"data": {"source": source}}, source="f.yaml")).split())
    assert "--data.source.parts <list of {name, path, weight, epochs, validation}> [{name: web, " in text
    for name, field in fields_of(MixturePart).items():
        assert f" {name} <{show(field.type)}>: " in text, name
    assert " size <int>: Sequences in a step." in text


def test_what_is_no_list_is_told_how_one_is_written():
    with pytest.raises(UserError) as error:
        resolve(Run, tiny(), patch={"data": {"source": {"kind": "mixture", "parts": {"a": 1}}}}, source="f.yaml")
    assert error.value.rule == "`data.source.parts` must be of type list of {name, path, weight, epochs, validation}."
    assert error.value.fix == (
        "write [{name: str, path: str, weight: float or [{step: int, weight: float}, ...]}, ...]"
    )


def test_the_mixture_of_the_manual_is_a_run():
    (text,) = re.findall(
        r"```yaml\n(# mixture.yaml.*?)```", (Path(__file__).parents[2] / "docs" / "data.md").read_text(), re.DOTALL
    )
    fields = {name: value for name, value in yaml.safe_load(text).items() if name != "base"}
    run = resolve(Run, tiny(), patch=fields, source="mixture.yaml")
    assert [part.name for part in run.data.source.parts] == ["web", "code"]
    assert run.data.source.parts[1].weight[1].weight == 0.5
