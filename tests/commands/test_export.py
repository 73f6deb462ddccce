"""`trellis export`, `import` and `generate` on a run of a few hundred parameters."""

import dataclasses
import json
import os
import re
import shutil
import weakref

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.train.small import trellis
from trellis.checkpoints.checkpoints import Checkpoints
from trellis.checkpoints.room import NoRoom
from trellis.commands import export
from trellis.commands.line import main
from trellis.data import byte_tokenizer
from trellis.data.tokenizer import END_OF_DOCUMENT
from trellis.errors import UserError
from trellis.hub.folder import write_tokenizer
from trellis.models import LlamaConfig, YarnScaling
from trellis.recipes import tiny
from trellis.run.data import StoreSource
from trellis.run.folder import alone, claim, open_run
from trellis.run.layouts import LayoutChoice
from trellis.run.run_file import write_run
from trellis.train.assemble import assemble
from trellis.train.restoring import restore_model

MODEL = LlamaConfig(
    vocab=257, embed=16, layers=2, heads=2, kv_heads=2, head_dim=8, mlp=32, rope_theta=1e4, tie_embeddings=False
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run that made no step, sliced over two devices, with a padded vocabulary and a moving average."""
    home = tmp_path_factory.mktemp("exchange")
    tokenizer = byte_tokenizer()
    write_tokenizer(tokenizer.json, tokenizer.end_of_document_text, home / "bytes", positions=64)
    (home / "bytes" / "more").mkdir()
    (home / "bytes" / "model.safetensors").write_text("the weights of the model that the tokenizer came with")
    base = tiny()
    data = dataclasses.replace(base.data, tokenizer=str(home / "bytes"))
    layout = LayoutChoice(params={"vocab": "data"})
    run = dataclasses.replace(base, model=MODEL, data=data, devices=2, layout=layout, ema=0.9)
    assembled = assemble(run, jax.devices()[:2])
    with assembled.layout:
        state = assembled.init()
    assert state.model.head.shape["vocab"] == 258
    claim(home / "run", run)
    with Checkpoints(home / "run" / "checkpoints") as saved:
        saved.save(7, state, data={"tokens": 0})
    return home / "run"


def model_of(folder):
    run = open_run(folder)
    assembled = assemble(run, jax.devices()[:2])
    with assembled.layout:
        return restore_model(assembled, folder)[0].model


@pytest.mark.slow
def test_out_and_in(run_folder, tmp_path, capsys):
    assert main(["export", str(run_folder), "--to", str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"step 7 of {run_folder}\n") and "model.safetensors" in out
    hub = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (hub["vocab_size"], hub["max_position_embeddings"], hub["eos_token_id"]) == (257, 64, 256)

    back = tmp_path / "back"
    words = ["import", str(tmp_path / "hf"), "--to", str(back), "--devices", "2", "--layout.preset", "fsdp"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.match(r"llama of [\d,]+ parameters\nfolder   ", out)
    assert "no text: that of the recipe has 4,096 token ids, and the model 257\n" in out
    assert open_run(back).model == MODEL
    before, after = (jax.device_get(model_of(folder)) for folder in (run_folder, back))
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        rows = min(x.shape[0], y.shape[0])  # the vocabulary is padded in the one and not in the other
        np.testing.assert_array_equal(x[:rows], y[:rows])

    texts = []
    for folder in (run_folder, back):
        words = ["generate", str(folder), "--prompt", "for x", "--tokens", "9", "--temperature", "0"]
        assert main(words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("for x")


@pytest.mark.slow
def test_over_devices(run_folder, capsys):
    words = ["generate", str(run_folder), "--prompt", "a", "--tokens", "5", "--samples", "2", "--seed", "3"]
    assert main([*words, "--devices", "2"]) == 0
    two = capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr().out == two


@pytest.mark.slow
def test_an_export_holds_a_layer_of_a_parameter_at_a_time(run_folder, tmp_path, monkeypatch):
    """Not the layers' stack of one, let alone the model: what is stored can be read in such parts."""
    wide = dataclasses.replace(MODEL, embed=128, heads=4, kv_heads=4, head_dim=32, mlp=512, layers=12)
    run = dataclasses.replace(open_run(run_folder), model=wide, layout=LayoutChoice(preset="fsdp"), ema=None)
    assembled = assemble(run, jax.devices()[:2])
    with assembled.layout:
        state = assembled.init()
    claim(tmp_path / "run", run)
    with Checkpoints(tmp_path / "run" / "checkpoints") as saved:
        saved.save(3, state, data={"tokens": 0})

    alive, most, count = weakref.WeakValueDictionary(), 0, 0
    read = Checkpoints.read

    def counted(self, *where):
        nonlocal most, count
        array = read(self, *where)
        alive[count] = array
        count += 1
        most = max(most, sum(x.nbytes for x in alive.values()))
        return array

    monkeypatch.setattr(Checkpoints, "read", counted)
    assert main(["export", str(tmp_path / "run"), "--dtype", "float32", "--to", str(tmp_path / "hf")]) == 0
    gate = state.model.layers.block.mlp.gate.array
    largest = gate.nbytes // wide.layers
    assert state.model.embedding.array.nbytes < largest <= most <= 2 * largest, "what is written, and the next"
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as saved:
        whole = saved.read(3, "model/layers/block/mlp/gate")
        np.testing.assert_array_equal(saved.read(3, "model/layers/block/mlp/gate", 5), whole[5])
    np.testing.assert_array_equal(whole, np.asarray(gate))


def refused(capsys, *words):
    assert main(list(words)) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_refusals(run_folder, tmp_path, capsys):
    assert "no such folder" in refused(capsys, "export", str(tmp_path / "none"), "--to", str(tmp_path / "x"))
    assert "seen:  step 3" in refused(capsys, "export", str(run_folder), "--to", str(tmp_path / "x"), "--step", "3")
    assert "A Hugging Face folder must have a config.json." in refused(capsys, "import", str(tmp_path))
    assert "A count must be 1 or more." in refused(capsys, "generate", str(run_folder), "--tokens", "0")
    for name, value in (("top-k", "3"), ("top-p", "0.5"), ("samples", "2")):
        there = refused(capsys, "generate", str(run_folder), "--temperature", "0", f"--{name}", value)
        assert f"seen:  {name}={value}, temperature=0: it has no effect" in there
    assert "`temperature` must be 0 or more." in refused(capsys, "generate", str(run_folder), "--temperature", "-1")
    assert "seen:  '\\udcff'\n  where: --prompt" in refused(
        capsys, "generate", str(run_folder), "--prompt", os.fsdecode(b"\xff")
    )
    for command, option, value in (
        ("generate", "--top-k", "0"),
        ("generate", "--top-p", "2"),
        ("generate", "--temperature", "nan"),
        ("evaluate", "--batches", "0"),
        ("evaluate", "--devices", "0"),
    ):
        assert f"  where: {option}\n" in refused(capsys, command, str(run_folder), option, value)
    there = refused(capsys, "evaluate", str(run_folder), "--devices", "3")
    assert (
        "batch_size=8 over data=3\n  where: --devices\n  fix:   use --devices 1, or a number that divides it" in there
    )
    assert "fix:   use --devices 1, or a number that divides it" in refused(
        capsys, "generate", str(run_folder), "--devices", "3"
    )
    for own, seen in ((run_folder, "run.yaml"), (run_folder / "checkpoints" / "step-00000007", "manifest.json")):
        there = refused(capsys, "export", str(run_folder), "--to", str(own))
        assert (
            f"An export needs a folder without another model, tokenizer or run.\n  seen:  {seen}" in there
            and "remove" not in there
        )
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    there = refused(capsys, "export", str(run_folder), "--to", str(tmp_path / "theirs"))
    assert "seen:  tokenizer.json" in there and "or remove what is there" in there
    there = refused(capsys, "export", str(run_folder), "--to", str(tmp_path / "x"), "--positions", "0")
    assert "seen:  --positions 0\n" in there and not (tmp_path / "x").exists()
    words = ["--dtype", "float32", "--positions", "4096"]
    main(["export", str(run_folder), "--to", str(tmp_path / "hf"), *words])
    hub = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert hub["max_position_embeddings"] == 4096 and hub["vocab_size"] == 257
    assert load_file(tmp_path / "hf" / "model.safetensors")["lm_head.weight"].shape == (257, 16)
    there = refused(capsys, "import", str(tmp_path / "hf"), "--to", str(run_folder))
    assert "The folder of an import cannot already contain a run." in there
    there = refused(capsys, "import", str(tmp_path / "hf"), "--model.layers", "3")
    assert (
        "The model of an import is that of its folder and cannot be changed." in there
        and "where: --model.layers" in there
    )
    there = refused(capsys, "import", str(tmp_path / "hf"), "--data.tokenizer", "other")
    assert "An imported model must use the tokenizer of its folder." in there and "seen:  other, beside" in there
    assert "fix:   leave it out" in there
    (tmp_path / "recipe.yaml").write_text("base: tiny\ndata: {tokenizer: other}")  # as in an imported run's folder
    there = refused(capsys, "import", str(tmp_path / "recipe.yaml"), str(tmp_path / "hf"))
    assert "seen:  other, beside" in there and "fix:   use --data.tokenizer null" in there


@pytest.mark.slow
def test_a_model_without_a_tokenizer_has_not_the_recipes(run_folder, tmp_path, capsys):
    main(["export", str(run_folder), "--to", str(tmp_path / "hf"), "--dtype", "float32"])
    (tmp_path / "hf" / "tokenizer.json").unlink()
    assert main(["import", str(tmp_path / "hf"), "--to", str(tmp_path / "run"), "--devices", "1"]) == 0
    assert f"no tokenizer.json; put the model's own in {tmp_path}/run/tokenizer" in capsys.readouterr().out
    there = refused(capsys, "generate", str(tmp_path / "run"))
    assert f"seen:  none in {tmp_path}/run/tokenizer" in there and "put the model's own in that folder" in there
    there = refused(capsys, "train", str(tmp_path / "run"))
    assert f"seen:  no tokenizer.json\n  where: {tmp_path}/run/tokenizer\n" in there
    assert "fix:   put the model's own tokenizer.json there, and tokenize text with the model's tokenizer: " in there
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "back"), "--dtype", "float32"]) == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)
    assert not (tmp_path / "back" / "tokenizer.json").exists()


@pytest.mark.slow
def test_what_is_advised_where_the_model_is_given(run_folder, tmp_path, capsys):
    """No other sizes of it, and text of its own tokenizer."""
    hf, run = tmp_path / "hf", str(tmp_path / "run")
    main(["export", str(run_folder), "--to", str(hf), "--dtype", "float32"])
    length, mesh = ["--data.sequence_length", "258"], ["--devices", "3", "--mesh.data", "1", "--mesh.model", "3"]
    there = refused(capsys, "import", str(hf), "--to", run, *length, *mesh)
    assert "model.heads=2 over model=3" in there
    assert "fix:   use --mesh sizes or a number of devices that divide it\n" in there
    fewer = json.loads((hf / "tokenizer.json").read_text())
    (hf / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    assert "A tokenizer must be a tokenizer.json" in refused(capsys, "import", str(hf), "--to", run)
    fewer["model"]["vocab"] = {text: i for text, i in fewer["model"]["vocab"].items() if i < 255} | {
        END_OF_DOCUMENT: 255
    }
    fewer["added_tokens"][0]["id"] = 255
    (hf / "tokenizer.json").write_text(json.dumps(fewer))
    for vocab, theirs in ((257, "'s tokenizer 256"), (4096, " 257")):
        shutil.rmtree(run, ignore_errors=True)
        words = ["--devices", "1", "--data.source.vocab", str(vocab), *length]
        assert main(["import", str(hf), "--to", run, *words]) == 0
        ours = f"no text: that of the recipe has {vocab:,} token ids, and the model{theirs}\n"
        assert f"{ours}to train or evaluate it, import with --data.source store" in capsys.readouterr().out
    assert "fix:   use --mesh sizes or a number" in refused(capsys, "train", run, *mesh)
    for command in ("train", "evaluate"):
        there = refused(capsys, command, run)
        assert f"fix:   tokenize text with the model's tokenizer: trellis tokenize TEXTS --tokenizer {run}/tok" in there


@pytest.mark.slow
def test_an_import_that_was_cut_off_is_made_again(run_folder, tmp_path, capsys, monkeypatch):
    main(["export", str(run_folder), "--to", str(tmp_path / "hf"), "--dtype", "float32"])
    words = ["import", str(tmp_path / "hf"), "--to", str(tmp_path / "run"), "--devices", "1"]

    def full(*_, **__):
        raise NoRoom("The disk must have room for the run's checkpoints.", seen="a full disk", where="", fix="")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", full)
        assert main(words) == 3 and (tmp_path / "run" / "run.yaml").exists()
    half = tmp_path / "run" / "checkpoints" / "step-00000000"  # as a killed process leaves it
    half.mkdir()
    shutil.copy(tmp_path / "run" / "run.yaml", half)
    with alone(tmp_path / "run"):
        assert "Only one process at a time can train in a run's folder." in refused(capsys, *words)
    assert main([*words, "--seed", "3"]) == 0 and open_run(tmp_path / "run").seed == 3
    assert "The folder of an import cannot already contain a run." in refused(capsys, *words)


@pytest.mark.slow
def test_an_imported_run_goes_where_its_folder_goes_and_nowhere_else(run_folder, tmp_path, capsys):
    main(["export", str(run_folder), "--to", str(tmp_path / "hf"), "--dtype", "float32"])
    main(["import", str(tmp_path / "hf"), "--to", str(tmp_path / "run"), "--devices", "1"])
    for recipe in (tmp_path / "run", tmp_path / "run" / "run.yaml"):
        there = refused(capsys, "train", str(recipe), "--run-dir", str(tmp_path / "other"))
        assert "The run of an imported model needs a folder with its weights." in there
        assert f"cp -r {tmp_path / 'run'} {tmp_path / 'other'}" in there and not (tmp_path / "other").exists()
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert open_run(moved).data.tokenizer == str(moved / "tokenizer")
    claim(moved, open_run(moved))
    (moved / "metrics.jsonl").write_text('{"step": 1}\n')
    there = refused(capsys, "train", str(moved), "--data.tokenizer", str(tmp_path / "hf" / "tokenizer"))
    assert "data.tokenizer: " in there and " in the folder, " in there  # long paths are shortened
    assert main(["export", str(moved), "--to", str(tmp_path / "back")]) == 0
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (moved / "tokenizer/tokenizer.json").read_bytes()


@pytest.mark.slow
def test_a_tokenizer_with_more_tokens_than_the_model(run_folder, tmp_path, capsys, monkeypatch):
    """The import says so, and every command refuses such tokens before it restores a model: gathers clamp them."""
    from tokenizers import Tokenizer

    main(["export", str(run_folder), "--to", str(tmp_path / "hf"), "--dtype", "float32"])
    inner = Tokenizer.from_str(byte_tokenizer().json)
    inner.add_special_tokens(["<|im_start|>"])
    (tmp_path / "hf" / "tokenizer.json").write_text(inner.to_str())
    (tmp_path / "text.txt").write_text("so much depends\n" * 99)
    text, store, run = (str(tmp_path / name) for name in ("text.txt", "store", "run"))
    main(["tokenize", text, "--out", store, "--tokenizer", str(tmp_path / "hf"), "--workers", "0"])
    data = ["--data.source", "store", "--data.source.path", store, "--data.source.validation", store]
    assert main(["import", str(tmp_path / "hf"), "--to", run, "--devices", "1", *data]) == 0
    assert "the tokenizer has 258 token ids, and the model 257: text with more is refused" in capsys.readouterr().out
    monkeypatch.setattr("trellis.train.restoring.Checkpoints", None)
    there = refused(capsys, "generate", run, "--prompt", "<|im_start|>user")
    assert "Every token of a prompt must be in the model's vocabulary." in there and "where: --prompt" in there
    for command in ("train", "evaluate"):
        there = refused(capsys, command, run)
        assert "seen:  258 ids in the store, 257 in the model" in there
        assert "without the tokens from 257 on" in there


@pytest.mark.slow
def test_what_an_import_does_not_use_is_kept_for_an_export(run_folder, tmp_path, capsys, monkeypatch):
    main(["export", str(run_folder), "--to", str(tmp_path / "hf"), "--dtype", "float32"])
    ends = {"bos_token_id": 3, "eos_token_id": [256, 4]}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(ends))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.25, "use_cache": False}))
    (tmp_path / "hf" / "additional_chat_templates").mkdir()
    (tmp_path / "hf" / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    assert main(["import", str(tmp_path / "hf"), "--to", str(tmp_path / "run"), "--devices", "1"]) == 0
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "back"), "--dtype", "float32"]) == 0
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text()) == ends
    assert (tmp_path / "back" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    hub = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {name: hub[name] for name in ends} == ends
    assert hub["attention_dropout"] == 0.25 and "use_cache" not in hub
    assert "training here drops nothing of what these say, and an export says it again: attention_dropout 0.25" in (
        capsys.readouterr().out
    )
    ended = {}
    monkeypatch.setattr("trellis.models.generate.sample", lambda *_, **how: ended.update(how) or [""])
    assert main(["generate", str(tmp_path / "run")]) == 0 and ended["ends"] == [256, 4]
    (tmp_path / "run" / "tokenizer" / "generation_config.json").unlink()  # config.json holds without it
    own = config | {"bos_token_id": 5, "eos_token_id": [256, 6], "pad_token_id": 7}
    (tmp_path / "run" / "imported.json").write_text(json.dumps(own))
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "own"), "--dtype", "float32"]) == 0
    hub = json.loads((tmp_path / "own" / "config.json").read_text())
    assert (hub["bos_token_id"], hub["eos_token_id"], hub["pad_token_id"]) == (5, [256, 6], 7)
    assert main(["generate", str(tmp_path / "run")]) == 0 and ended["ends"] == [256, 6]
    (tmp_path / "run" / "tokenizer" / "generation_config.json").write_text("[]")
    assert "The folder's .json files must be valid JSON, an object each." in refused(
        capsys, "export", str(tmp_path / "run"), "--to", str(tmp_path / "again")
    )


@pytest.mark.slow
def test_an_export_says_if_its_tokenizer_puts_something_around_texts(run_folder, tmp_path, capsys):
    from tokenizers import Tokenizer, processors

    inner = Tokenizer.from_str(byte_tokenizer().json)
    inner.add_special_tokens(["<s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer.json").write_text(inner.to_str())
    said = "trained without the <s> that `transformers` puts around a text"
    shutil.copytree(run_folder, tmp_path / "run")
    lines = (run_folder / "run.yaml").read_text().splitlines()
    for i, name in enumerate(("own/tokenizer.json", "own")):
        changed = [f"  tokenizer: {tmp_path}/{name}" if "  tokenizer:" in line else line for line in lines]
        (tmp_path / "run" / "run.yaml").write_text("\n".join(changed))
        assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / f"hf{i}"), "--dtype", "float32"]) == 0
        assert said in capsys.readouterr().out
    assert main(["import", str(tmp_path / "hf0"), "--to", str(tmp_path / "back"), "--devices", "1"]) == 0
    assert "texts here are without the <s> that `transformers` puts around them: " in capsys.readouterr().out
    assert main(["export", str(tmp_path / "back"), "--to", str(tmp_path / "again"), "--dtype", "float32"]) == 0
    assert said not in capsys.readouterr().out  # it was not trained here


def test_the_positions_of_an_export_are_the_models_where_it_has_some():
    scaling = YarnScaling(factor=4.0, original_context=16)
    run = dataclasses.replace(tiny(), model=dataclasses.replace(MODEL, rope_scaling=scaling))
    assert export._positions(tiny(), None) == 64 and export._positions(tiny(), 9) == 9
    assert export._positions(run, None) == export._positions(run, 64) == 64
    with pytest.raises(UserError, match="--positions 65 of a model with 64"):
        export._positions(run, 65)


def test_a_store_that_is_not_where_the_runs_file_says(tmp_path, capsys, monkeypatch):
    """As in another working directory, or on another machine: these commands have no option for its place."""
    monkeypatch.chdir(tmp_path)
    run = dataclasses.replace(tiny(), devices=1)
    data = dataclasses.replace(run.data, source=StoreSource(path="stores/a", validation="stores/b"))
    (tmp_path / "my run").mkdir()
    write_run(dataclasses.replace(run, data=data), tmp_path / "my run" / "run.yaml")
    also = ", or a tokenizer.json as its data.tokenizer"
    for words, more in ((("evaluate",), ""), (("generate",), also), (("export", "--to", "out"), also)):
        code, _, err = trellis(capsys, *words, "my run")
        assert code == 2 and err == (
            "trellis: A run's token stores must be where its run.yaml says.\n"
            f"  seen:  no such folder in {tmp_path}\n"
            "  where: stores/a\n"
            "  fix:   start the command where this path leads to the store, or write the store's path into "
            f"'my run/run.yaml'{more}\n"
        )
