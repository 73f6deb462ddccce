"""Options that nothing in a run heeds are refused where a user gave them, and left where a recipe has them."""

import pytest

from tests.train.small import trellis
from trellis.errors import UserError
from trellis.recipes.load import load
from trellis.run.unheeded import check_given

MOE = {
    "model": "{family: mixtral, vocab: 257, embed: 32, layers: 2, heads: 4, mlp: 64, kv_heads: 2, head_dim: 16, "
    "rope_theta: 10000.0, experts: 4, experts_per_token: 2, tie_embeddings: false}"
}
CASES = [
    ("layout.context=exchange", {}, "mesh.context=2"),
    ("layout.context=ring", {"mesh.context": "2", "mesh.context_y": "2", "layout.context_y": "gather"}, ""),
    ("layout.context=gather", {"mesh.context": "2", "layout.compute.pos": "", "layout.compute.batch": "context"}, None),
    ("layout.context=gather", {"mesh.context": "2", "layout.mode": "auto"}, ""),
    ("layout.gather=per_axis", {"mesh.data": "2", "mesh.context": "2", "layout.mode": "auto"}, "layout.mode=explicit"),
    ("layout.context_y=gather", {"mesh.context": "2"}, "mesh.context_y=2"),
    ("layout.context=exchange", {"mesh.context_y": "2"}, ""),
    ("layout.context=exchange", {"mesh.data": "1", "mesh.context": "-1"}, ""),
    ("layout.gather=per_axis", {"mesh.model": "1"}, "mesh.data_y=2"),
    ("layout.gather=per_axis", {"mesh.data": "2", "mesh.stage": "2", "mesh.model": "2"}, "mesh.data_y=2"),
    ("layout.gather=per_axis", {"mesh.data": "2", "mesh.context": "2"}, ""),
    ("layout.gather=joint", {}, ""),
    ("layout.strict=true", {"layout.mode": "auto"}, "layout.mode=explicit"),
    ("layout.strict=true", {}, ""),
    ("layout.strict=false", {"layout.mode": "auto"}, ""),
    ("layout.compute.pos=model", {}, "mesh.model=2"),
    ("layout.params.vocab=data_y/data_z", {}, "mesh.data_y=2"),
    ("layout.params.vocab=data_y/data", {}, ""),
    ("layout.compute.batch=replica", {"layout.preset": "hybrid"}, ""),
    ("layout.compute.pos=", {}, ""),
    ("layout.compute.pos=data", {"mesh.context": "2"}, "layout.compute.pos=context"),
    ("layout.compute.pos=data/context", {"mesh.context": "2"}, ""),
    ("layout.overlap=mlp,heads", {"layout.preset": "fsdp_tensor_sequence"}, "mesh.model=2"),
    ("model.routing.way=ragged", MOE, "mesh.expert=2"),
    ("model.routing.way=grouped", MOE, ""),
    ("model.routing.way=slots", {**MOE, "layout.mode": "auto"}, "mesh.expert=2"),
    ("model.routing.way=slots", {**MOE, "layout.mode": "auto", "mesh.expert": "2"}, ""),
    ("model.routing.slack=2", MOE, "mesh.expert=2"),
    ("model.routing.slack=2", {**MOE, "mesh.expert": "2", "model.routing.way": "gather"}, "model.routing.way=auto"),
    ("guard.replay=false", {}, "guard.every=100"),
    ("weight_decay_exclude=mlp", {"optimizer.weight_decay": "0"}, "optimizer.weight_decay=0.1"),
    ("checkpoints.keep_every=10", {"checkpoints.every": "null"}, "checkpoints.every=10"),
    ("checkpoints.keep_every=25", {"checkpoints.every": "10", "steps": "40"}, "checkpoints.keep_every=30"),
    ("checkpoints.keep_every=25", {"checkpoints.every": "10", "steps": "50"}, ""),
    ("checkpoints.keep_every=50", {"checkpoints.every": "30", "steps": "40"}, ""),
    ("evaluation.sample=true", {"evaluation.every": "null"}, "evaluation.every=100"),
    ("evaluation.sample=false", {"evaluation.every": "null"}, ""),
    ("deadline.seconds=60", {"deadline.factor": "null"}, "deadline.factor=20"),
]


@pytest.mark.parametrize(("option", "others", "fix"), CASES)
def test_an_option_without_an_effect_is_refused_to_who_gave_it_and_its_fix_can_be_followed(option, others, fix):
    name, _, value = option.partition("=")
    loaded = load("tiny", {**others, name: value})
    assert check_given(loaded.run, others.keys()) is None  # a recipe, or a file, may say it
    if fix == "":
        return check_given(loaded.run, loaded.given)
    with pytest.raises(UserError, match="it has no effect") as error:
        check_given(loaded.run, loaded.given)
    assert error.value.where == f"--{name}" and f"{name.rpartition('.')[2]}=" in error.value.seen
    if fix is not None:
        field, _, wanted = fix.partition("=")
        assert f"--{field} {wanted}" in error.value.fix or f"a --{field}, as {wanted}" in error.value.fix
        mended = load("tiny", {**others, name: value, field: wanted})
        check_given(mended.run, mended.given)


def test_options_that_set_several_fields_at_once_are_held_likewise():
    loaded = load("tiny", {"layout": "{context: exchange, compute: {pos: context}}"})
    assert loaded.given == {"layout", "layout.context", "layout.compute", "layout.compute.pos"}
    with pytest.raises(UserError, match="mesh.context=1: it has no effect"):
        check_given(loaded.run, loaded.given)


@pytest.mark.slow
def test_commands_refuse_it_on_the_mesh_that_they_take(capsys, tmp_path):
    for words in (("train", "--run-dir", tmp_path), ("memory", "--on", "8xH100"), ("prove", "--on", "8xH100")):
        code, _, said = trellis(capsys, *words[:1], "tiny", *words[1:], "--layout.context", "exchange")
        assert code == 2 and "context=exchange, mesh.context=1: it has no effect" in said, said
    plan = ("plan", "tiny", "--on", "v5e:4x4", "--layout.gather", "per_axis")  # whose mesh gets two axes of data
    assert trellis(capsys, *plan)[0] == 0
    code, _, said = trellis(capsys, *plan, "--mesh.data", 16)
    assert code == 2 and "gather=per_axis, parameters gathered over data: it has no effect" in said
