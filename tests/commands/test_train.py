"""Real runs through the command line: a folder, a report, evaluation, and refusals."""

import dataclasses
import json
import os
import re
import sys
from types import SimpleNamespace

import jax
import pytest

from tests.train.small import trellis
from trellis.commands import evaluate, line, train
from trellis.errors import UserError
from trellis.optim import Linear
from trellis.recipes import tiny
from trellis.run.folder import claim
from trellis.run.layouts import LayoutChoice, MeshSizes
from trellis.run.overrides import resolve
from trellis.train import Run, checks
from trellis.train.assemble import assemble
from trellis.train.trackers import read_lines

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.slow
def test_the_time_that_is_told_counts_the_validation_batches_that_there_are(run_file, tmp_path, capsys, monkeypatch):
    feeds = []

    def seen(assembled, feed, *_, **__):
        feeds.append(feed)
        raise UserError("It is seen.", seen="", where="", fix="")

    monkeypatch.setattr("trellis.train.loop.train", seen)
    for batches in (1, 10**6):
        code, _, err = trellis(capsys, "train", run_file, "--run-dir", tmp_path / "a", "--evaluation.batches", batches)
        assert code == 2 and "It is seen" in err
    few, many = (feed.validation_batches for feed in feeds)
    assert few == 1 and 1 < many < 100


def test_a_recipes_name_is_the_recipe_beside_a_folder_of_that_name_too(run_file, tmp_path, capsys, monkeypatch):
    taken = []
    monkeypatch.setattr(train, "train_run", lambda run, folder, *_, **__: taken.append((run.steps, folder)) or 0)
    monkeypatch.chdir(tmp_path)
    for words in ((run_file, "--run-dir", "tiny"), ("./tiny",), ("tiny", "--run-dir", "b"), ("tiny",)):
        code, out, err = trellis(capsys, "train", *words, "--until", 0)
        assert code == 0, err
        assert f"train {tmp_path / 'tiny'}` resumes it" in out or taken[-1][1].name != "tiny"
    (steps, other), new = taken[-2:]
    assert taken[:2] == [(6, tmp_path / "tiny")] * 2 and (steps, str(other)) == (20, "b")
    assert new[0] == 20 and new[1].parent.name == "runs"


@pytest.mark.slow
def test_a_run_from_its_first_step_to_its_report(run_file, tmp_path, capsys):
    folder = tmp_path / "run"
    code, out, err = trellis(capsys, "train", run_file, "--run-dir", folder, "--layout.preset", "single")
    assert code == 0, err
    for words in (
        "model    llama, 33.0k parameters",
        "tokens   1.54k to read",
        "devices  1 x cpu",
        "moves    nothing",
        f"folder   {folder}",
    ):
        assert words in out
    assert "step 6/6  loss " in err and "bits/byte" in err
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "run.yaml",
        "metrics.jsonl",
        "ledger.txt",
        "checkpoints",
        "samples.jsonl",
        "about.json",
        "report.html",
    }
    last = read_lines(folder / "metrics.jsonl")[-1]
    wanted = "step tokens loss learning_rate grad_norm tokens_per_second mfu step_seconds validation_loss bits_per_byte"
    assert set(wanted.split()) <= set(last) and last["mfu"] > 0
    assert (folder / "checkpoints" / "step-00000006" / "run.yaml").read_text() == (folder / "run.yaml").read_text()

    code, out, _ = trellis(capsys, "evaluate", folder, "--batches", 2, "--json")
    found = json.loads(out)
    assert code == 0 and found["step"] == 6 and found["batches"] == 2
    assert found["validation_loss"] == pytest.approx(last["validation_loss"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-6)
    code, out, _ = trellis(capsys, "evaluate", folder)
    assert code == 0
    assert re.match(r"step 6, all (\d+) batches of validation text; the run's own figures are for 2 of \1\n", out), out
    # Every byte is a token here, but the ends of documents are tokens and no text.
    assert found["bits_per_byte"] == pytest.approx(found["validation_loss"] / 0.6931, rel=0.01)

    code, _, err = trellis(capsys, "train", run_file, "--run-dir", folder, "--optimizer.learning_rate", "0.5")
    assert code == 2
    assert "A run folder holds one run, and can only be used to resume it." in err
    assert "learning_rate" in err and f"where: {folder / 'run.yaml'}" in err
    assert f"resume what is there: trellis train {folder}" in err

    file = folder / "run.yaml"
    file.write_text(file.read_text().replace("learning_rate: 0.01", "learning_rate: 0.02"))
    code, _, err = trellis(capsys, "train", folder)
    assert code == 2 and "optimizer.learning_rate: 0.01 in the checkpoint, 0.02 asked for" in err
    assert f"where: {folder / 'checkpoints' / 'step-00000006' / 'run.yaml'}" in err
    assert f"fix:   use another --run-dir, or copy this file to {file}" in err


def test_a_run_does_not_pretend_to_write_to_a_bucket(run_file, tmp_path, capsys):
    code, _, err = trellis(capsys, "train", run_file, "--run-dir", "gs://bucket/run")
    assert code == 2
    assert "A run's folder must be in a file system." in err and "where: gs://bucket/run" in err
    assert "fix:   mount the bucket (gcsfuse, s3fs) and use its folder" in err
    code, _, err = trellis(capsys, "train", run_file, "--run-dir", tmp_path / os.fsdecode(b"a\xff"))
    assert code == 2 and "The path of a run's folder must be valid UTF-8." in err and not any(tmp_path.glob("a*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--batch_size", 7, "--devices", 8),
            [
                "The batch must split evenly over the mesh axes of `batch` and into microbatches.",
                "batch_size=7 over data=8",
                "batch_size",
                "use --batch_size 8, or --mesh sizes or a number of devices that divide it",
            ],
        ),
        (
            ("--batch_size", 18, "--microbatches", 3, "--devices", 8, "--mesh.model", 2),
            [
                "The batch must split evenly over the mesh axes of `batch` and into microbatches.",
                "batch_size=18 over data=4 x microbatches=3 = 12",
                "batch_size",
                "use --batch_size 12 or 24, or --mesh sizes or a number of devices that divide it",
            ],
        ),
        (
            ("--data.sequence_length", 31, "--mesh.context", 2, "--devices", 8),
            [
                "A sequence must split evenly over the mesh axes of `pos`.",
                "data.sequence_length=31 over context=2",
                "data.sequence_length",
                "use --data.sequence_length 30 or 32, or --mesh sizes or a number of devices that divide it",
            ],
        ),
        (
            ("--layout.compute.nosuch", "data", "--devices", 8),
            [
                "A layout entry must name an axis of the model.",
                "`nosuch`",
                "layout.compute.nosuch",
                "use one of: batch, embed, head_dim, heads, key_pos, kv_heads, layers, mlp, pos, vocab",
            ],
        ),
        (
            ("--layout.params.embd", "data", "--devices", 8),
            ["A layout entry must name an axis of the model.", "`embd`", "layout.params.embd", "did you mean `embed`?"],
        ),
        (
            ("--run-dir", "/dev/null/x"),
            [
                "The run's folder must be writable.",
                "Not a directory",
                "/dev/null/x",
                "use another --run-dir, in a folder that you can write to",
            ],
        ),
        (
            ("--batch_size", 4, "--devices", 4, "--model.embed", 30, "--mesh.data", 4),
            [
                "Mesh axes must divide the axis that they slice.",
                "model.embed=30 over data=4",
                "model.embed",
                "use --model.embed 28 or 32, or --mesh sizes or a number of devices that divide it",
            ],
        ),
        (
            ("--precision.exceptions.noorm", "float32"),
            [
                "A part of names must match the name of at least one parameter, or one of its axes.",
                "`noorm`",
                "precision.exceptions",
                "did you mean `norm` or `mlp_norm`?",
            ],
        ),
        (
            ("--precision.products.mlp", "int8", "--precision.products.vocab", "int8"),
            [
                "Narrow products must be those of layers' weights (of experts in fp8 or int8) or of the unembedding "
                "(in fp8 or mxfp8, which can represent small probabilities).",
                "int8 for `embedding`",
                "precision.products",
                "use fp8 or mxfp8 for it",
            ],
        ),
        (
            ("--precision.products.mlp", "fp8", "--precision.products.up", "int8"),
            [
                "Of several parts that match a parameter's name, only the first one listed applies.",
                "`up: int8`, after `mlp: fp8`, which matches its parameters",
                "precision.products",
                "list `up` before `mlp`, or leave it out",
            ],
        ),
        (
            ("--precision.products.norm", "int8"),
            [
                "Narrow products must be those of layers' weights (of experts in fp8 or int8) or of the unembedding "
                "(in fp8 or mxfp8, which can represent small probabilities).",
                "`norm`, which matches no weight that multiplies",
                "precision.products",
                "name parts of `block.attention.q`, `block.attention.k`, `block.attention.v`, `block.attention.out`, "
                "`block.mlp.gate`, `block.mlp.up`, `block.mlp.down`, or `vocab`",
            ],
        ),
        (
            ("--weight_decay_exclude", "norm,bias,vocabulary"),
            [
                "A part of names must match the name of at least one parameter, or one of its axes.",
                "`vocabulary`",
                "weight_decay_exclude",
                "did you mean `vocab`?",
            ],
        ),
        (
            ("--remat.policy", "saved", "--remat.names", "mlp_hidden"),
            [
                "`remat.names` can list only names that the model marks.",
                "`mlp_hidden`",
                "remat.names",
                "use one of: attention, key, mlp_gate, mlp_up, query, value",
            ],
        ),
        (
            ("--model.mlp", 2147483647, "--layout.preset", "single"),
            [
                "A run's state and its step must fit in memory.",
                "at least 4.50 TiB on 1 x cpu, 16.0 GiB free on this machine",
                "the run",
                "use a smaller model or batch, or more devices; `trellis memory` shows what each device holds",
            ],
        ),
        (
            ("--compiler_options.nosuch", "1", "--layout.preset", "single"),
            [
                "Compiler options must be known to the compiler and have valid values.",
                "INVALID_ARGUMENT: No such compile option: 'nosuch'",
                "compiler_options",
                "leave it out, or write it as this platform's XLA does",
            ],
        ),
        (
            ("--until", -1),
            [
                "`--until` must be 0 or more.",
                "-1",
                "--until",
                "use --until 0 for the first checkpoint only",
            ],
        ),
        (
            ("--steps", 4, "--until", 5),
            [
                "A run cannot pause after its end.",
                "--until 5, steps 4",
                "--until",
                "leave it out, or use --steps 5 for more steps",
            ],
        ),
        (
            ("--run-dir", ""),
            [
                "A run's folder must have a name.",
                "no letter",
                "--run-dir",
                "name one, or leave the option out for a new one: runs/NAME-DATE",
            ],
        ),
    ],
)
def test_what_a_run_cannot_be_is_said_in_four_parts(run_file, tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.setattr(checks, "free_memory", lambda: 16 << 30)
    where = () if "--run-dir" in options else ("--run-dir", tmp_path / "run")
    code, _, err = trellis(capsys, "train", run_file, *where, *options)
    rule, seen, where, fix = message
    assert (code, err) == (2, f"trellis: {rule}\n  seen:  {seen}\n  where: {where}\n  fix:   {fix}\n")


@pytest.mark.slow
def test_a_step_that_is_too_large_is_refused_before_it_is_compiled(run_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checks, "free_memory", lambda: 3 << 20)
    options = ("--run-dir", tmp_path / "run", "--layout.preset", "single", "--batch_size", 512, "--microbatches", 1)
    code, _, err = trellis(capsys, "train", run_file, *options)
    assert code == 2 and "A run's state and its step must fit in memory." in err
    assert "on 1 x cpu, 3.00 MiB free on this machine" in err
    grows = [*options[:4], "--batch_size", "[{step: 0, size: 8}, {step: 4, size: 512}]", "--microbatches", 1]
    code, _, err = trellis(capsys, "train", run_file, *grows)
    assert code == 2 and "on 1 x cpu, 3.00 MiB free on this machine" in err, "before it has grown"
    code, _, err = trellis(capsys, "train", run_file, *options, "--microbatches", 128, "--until", 1)
    assert code == 0, "and may then be corrected"


@pytest.mark.slow
def test_the_memory_of_a_batch_that_grows_is_that_of_its_largest(run_file, tmp_path, capsys):
    told = []
    for sizes in ("[{step: 0, size: 4}, {step: 3, size: 16}]", "16"):
        words = ("--layout.preset", "data", "--devices", 2, "--batch_size", sizes, "--until", 0)
        code, out, err = trellis(capsys, "train", run_file, "--run-dir", tmp_path / str(len(told)), *words)
        assert code == 0, err
        told += re.findall("^memory .*", out, re.MULTILINE)
    assert len(told) == 2 and told[0] == told[1]


@pytest.mark.slow
def test_a_run_is_paused_before_its_first_step_and_resumed_by_its_folder(run_file, tmp_path, capsys):
    folder = tmp_path / "run"
    code, _, err = trellis(capsys, "train", run_file, "--run-dir", folder, "--until", 0, "--layout.preset", "single")
    assert code == 0, err
    assert (folder / "checkpoints" / "step-00000000" / "manifest.json").exists()
    assert not read_lines(folder / "metrics.jsonl")
    assert read_lines(folder / "timeline.jsonl", float | str)[-1]["event"] == "paused"
    code, out, err = trellis(capsys, "train", folder, "--until", 2)
    assert code == 0, err
    assert f"folder   {folder}" in out and "paused   after step 2; `trellis train" in out
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1, 2]
    code, _, err = trellis(capsys, "train", folder / "run.yaml", "--run-dir", folder, "--layout.preset", "fsdp")
    assert code == 0 and "resuming after step 2" in err
    about = json.loads((folder / "about.json").read_text())
    assert len(about["tokenizer"]) == 64  # what its losses are counted over, wherever the tokenizer lies
    (found,) = about["structure"]
    assert found["right"] and found["rows"] > 20
    line = f"{found['rows']} of {found['rows']} rows of the ledger are in the {found['collectives']} collectives"
    assert f"matched  {line}" in err and line in (folder / "ledger.txt").read_text()
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_a_signal_stopped_says_how_it_goes_on(run_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "train_run", lambda *_, **__: 143)
    options = ("--layout.preset", "single", "--microbatches", 1, "--cpu.measure", "false")
    code, out, _ = trellis(capsys, "train", run_file, "--run-dir", tmp_path / "run", *options)
    assert code == 143 and re.search(rf"stopped  after step 0; `.*trellis train {tmp_path / 'run'}` resumes it", out), (
        out
    )
    (tmp_path / "run" / "metrics.jsonl").touch()

    def write(text):
        raise BrokenPipeError

    monkeypatch.setattr(sys.stdout, "write", write)
    assert line.main(["train", str(tmp_path / "run")]) == 143, "nobody reads what it prints"


@pytest.mark.slow
def test_a_run_that_has_no_validation_text_or_no_tokenizer_says_so(run_file, tmp_path, capsys, monkeypatch):
    """The first step is not made: it is before anything is compiled that this is of use."""
    base = ("train", run_file, "--layout.preset", "single", "--until", 0, "--run-dir")
    code, out, err = trellis(capsys, *base, tmp_path / "with")
    assert code == 0 and "no validation loss" not in out and "samples" not in out, err
    monkeypatch.setattr("trellis.train.corpus._tokenizer_of", lambda store: None)  # as of other projects' formats
    code, out, err = trellis(capsys, *base, tmp_path / "without", "--data.source.validation", "null")
    assert code == 0, err
    assert "text     all of it is trained on, so there is no validation loss" in out
    assert "add --data.source.validation stores/validation to a new run" in out
    assert f"--out stores/validation --tokenizer {run_file.parent}/train\n" in out
    parts = [{"name": "a", "path": "my store", "weight": 1.0}]
    mixed = resolve(Run, tiny(), options={"data.source": json.dumps({"kind": "mixture", "parts": parts})})
    for made_by, named, words in (("sha", None, "'my store'"), (None, "gpt 2", "'gpt 2'"), (None, None, "TOKENIZER")):
        run = dataclasses.replace(mixed, data=dataclasses.replace(mixed.data, tokenizer=named))
        corpus = SimpleNamespace(stores={"a": SimpleNamespace(tokenizer_sha256=made_by)})
        said = train._without_validation(run, corpus)
        assert "--data.source.parts.0.validation stores/" in said and said.endswith(f"--tokenizer {words}")
    assert "samples  none: the token store has no tokenizer; set one with --data.tokenizer tokenizer.json" in out
    code, _, err = trellis(capsys, "evaluate", tmp_path / "without")
    assert code == 2 and "An evaluation needs validation text." in err


def test_a_run_that_is_longer_than_its_data_is_refused_before_its_first_step(run_file, tmp_path, capsys):
    source = f"{{kind: mixture, parts: [{{name: a, path: {run_file.parent}/train, weight: 1, epochs: 1}}]}}"
    words = ("train", run_file, "--run-dir", tmp_path / "run", "--devices", 1, "--data.source", source, "--steps", 999)
    code, _, said = trellis(capsys, *words)
    assert code == 2 and "The data must last as long as the run." in said and "batches for 999 steps" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    (there,) = re.findall(r"fix:   use --steps (\d+), or more epochs: null repeats a part without end", said)
    assert int(there) > 0 and f"seen:  {there} batches" in said


def test_another_number_of_steps_tells_the_learning_rate_that_it_makes(tmp_path):
    run = dataclasses.replace(tiny(), schedule=Linear(warmup_steps=0, final_fraction=0.0))
    claim(tmp_path, run)
    longer = dataclasses.replace(run, steps=40)
    assert train._changed(tmp_path, longer, 10) == []  # it has not begun
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    rates = "with a learning rate in step 11 of 0.00725 instead of 0.0045"
    words = f"steps    20 -> 40: the schedule follows the new number, {rates}"
    assert train._changed(tmp_path, longer, 10) == [words]
    assert train._changed(tmp_path, run, 10) == train._changed(tmp_path, longer, 0) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": MeshSizes(stage=2), "layout": LayoutChoice(pipeline_microbatches=4), "accumulation": "sharded"},
        {"mesh": MeshSizes(model=2), "layout": LayoutChoice(preset="fsdp_tensor_sequence", overlap=("mlp",))},
        {"microbatches": 8},
    ],
)
def test_a_run_is_evaluated_on_devices_in_a_row_however_its_steps_are_cut(fields):
    for devices in (1, 8):
        run = evaluate._in_one_row(dataclasses.replace(tiny(), **fields), devices)
        assert (run.devices, run.mesh, run.microbatches) == (devices, MeshSizes(), None)
        assert assemble(run, jax.devices()[:devices]).layout.mesh.size == devices


def test_a_measure_that_is_not_known_is_null():
    said = evaluate._as_json(3, 2, {"validation_loss": 2.5, "bits_per_byte": float("nan")})
    assert said == '{"step": 3, "batches": 2, "validation_loss": 2.5, "bits_per_byte": null}'
