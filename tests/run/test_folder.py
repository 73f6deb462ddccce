"""A run's folder holds one run, and its corpus is what its configuration says."""

import dataclasses
import fcntl
import os
import re
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.models.small import CONFIGS
from trellis.data import FileSource, Tokenizer, find_files, open_store, tokenize
from trellis.data.store.opening import convert
from trellis.errors import UserError
from trellis.files import check_utf8
from trellis.optim import AdamW
from trellis.recipes import tiny
from trellis.run.config import Evaluation, Profile
from trellis.run.data import Data, EmbeddedSource, MixturePart, MixtureSource, PartWeight, StoreSource
from trellis.run.folder import (
    alone,
    check_as_saved,
    check_path,
    check_run_folder,
    claim,
    made,
    new_folder,
    open_run,
    unchanged_if_refused,
    was_left,
)
from trellis.run.run_file import write_run
from trellis.train.assemble import layout_of
from trellis.train.corpus import open_corpus


def test_a_folder_is_claimed_once_and_resumed_by_the_same_run(tmp_path):
    run, folder = tiny(), tmp_path / "a" / "run"
    claim(folder, run)
    assert open_run(folder) == run
    longer = dataclasses.replace(run, steps=40, evaluation=Evaluation(every=7))
    claim(folder, longer)
    assert open_run(folder) == longer, "what may change is written anew"
    claim(folder, dataclasses.replace(run, steps=50), write=False)
    assert open_run(folder) == longer


def test_a_folder_of_another_run_is_refused(tmp_path):
    claim(tmp_path, dataclasses.replace(tiny(), seed=4))
    claim(tmp_path, tiny())  # no step was made there
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    other = dataclasses.replace(tiny(), seed=3, optimizer=AdamW(learning_rate=0.5))
    with pytest.raises(UserError, match="A run folder holds one run") as error:
        claim(tmp_path, other)
    assert (
        error.value.seen
        == "optimizer.learning_rate: 0.01 in the folder, 0.5 asked for; seed: 0 in the folder, 3 asked for"
    )
    assert error.value.where == str(tmp_path / "run.yaml")
    assert error.value.fix == (f"use another --run-dir, or resume what is there: trellis train {tmp_path}")
    assert open_run(tmp_path) == tiny()
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    copy = (tmp_path / "run.yaml").rename(tmp_path / "checkpoints" / "step-00000001" / "run.yaml")
    with pytest.raises(UserError, match="A run folder holds one run") as error:
        claim(tmp_path, other)
    assert error.value.where == str(copy) and f"copy this file to {tmp_path}/run.yaml and resume" in error.value.fix
    claim(tmp_path, tiny())
    assert open_run(tmp_path) == tiny(), "it is written again"


def test_a_checkpoint_of_another_run_than_the_file_says_is_refused(tmp_path):
    """Whoever edits `run.yaml` changes what is resumed, which the folder's file alone does not show."""
    saved = tmp_path / "checkpoints" / "step-00000001"
    saved.mkdir(parents=True)
    check_as_saved(tiny(), tmp_path, saved)  # it has no copy
    write_run(tiny(), saved / "run.yaml")
    moved = dataclasses.replace(tiny(), steps=90, data=dataclasses.replace(tiny().data, tokenizer="elsewhere"))
    check_as_saved(moved, tmp_path, saved)
    with pytest.raises(UserError, match="A run folder holds one run") as error:
        check_as_saved(dataclasses.replace(tiny(), seed=3), tmp_path, saved)
    assert error.value.seen == "seed: 0 in the checkpoint, 3 asked for"
    assert error.value.where == str(saved / "run.yaml")
    assert error.value.fix == f"use another --run-dir, or copy this file to {tmp_path / 'run.yaml'}"
    for validation in (None, "b"):  # `trellis evaluate` asks for one
        source = StoreSource(path="a", validation=validation)
        mixture = MixtureSource(parts=(MixturePart(name="a", path="a", validation=validation, weight=1.0),), block=8)
        for place, which in (("store", source), ("mixture", mixture)):
            run = dataclasses.replace(tiny(), data=dataclasses.replace(tiny().data, source=which))
            (tmp_path / place).mkdir(exist_ok=True)
            if validation is None:
                write_run(run, tmp_path / place / "run.yaml")
            check_as_saved(run, tmp_path, tmp_path / place)


def test_a_checkpoint_is_no_folder_of_a_run(tmp_path):
    """It has a `run.yaml`, from which a new run would begin inside of it."""
    saved = tmp_path / "checkpoints" / "step-00000012"
    (saved / "state").mkdir(parents=True)
    write_run(tiny(), saved / "run.yaml")
    for opened in (check_path, open_run):
        with pytest.raises(UserError, match="A run's folder is the one that has its checkpoints") as error:
            opened(saved)
        assert error.value.seen == "the checkpoint of step 12" and error.value.where == str(saved)
        assert error.value.fix.startswith("name the folder of its run; `trellis evaluate`, ")
    write_run(tiny(), tmp_path / "run.yaml")
    with pytest.raises(UserError) as error:
        open_run(saved)
    use = "`trellis evaluate`, `generate` and `export` take it with --step 12"
    assert error.value.fix == f"name {tmp_path}; {use}"
    for opened in (check_run_folder, open_run):
        with pytest.raises(UserError, match="A run's folder is the one that has its checkpoints") as error:
            opened(tmp_path / "checkpoints")
        assert error.value.fix == f"name {tmp_path}"
    check_path(tmp_path / "checkpoints")  # a run's own checkpoints are there


def test_only_steps_that_are_not_yet_made_can_be_profiled(tmp_path):
    run = dataclasses.replace(tiny(), profile=Profile(start=2))
    claim(tmp_path, run)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    claim(tmp_path, run, done=10)  # the same command again
    claim(tmp_path, dataclasses.replace(run, profile=Profile(start=10)), done=10)
    with pytest.raises(UserError, match="Profiling must start at a step that is not yet made") as error:
        claim(tmp_path, dataclasses.replace(run, profile=Profile(start=9)), done=10)
    assert error.value.seen == "start=9, 10 steps done" and error.value.where == "--profile.start"
    assert error.value.fix == "use --profile.start 10 or more"
    with pytest.raises(UserError, match="Profiling must start at a step that is not yet made") as error:
        claim(tmp_path, dataclasses.replace(run, profile=Profile(start=9), steps=10), done=10)
    assert error.value.fix == "use --profile.start 10 or more, and --steps 11 or more"


def test_a_resumed_run_may_compute_the_same_in_another_way(tmp_path):
    """A mesh of one microbatch has none to accumulate, and not every mesh or platform has each way to experts."""
    model = CONFIGS["mixtral"]
    routed = lambda **options: dataclasses.replace(model, routing=dataclasses.replace(model.routing, **options))
    run = dataclasses.replace(
        tiny(), model=routed(way="slots", slack=2.0), microbatches=2, accumulation="sharded",
        compiler_options={"xla_cpu_enable_fast_math": "false"},
    )  # fmt: skip
    claim(tmp_path, run)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    other = {"microbatches": 1, "accumulation": "pending", "compiler_options": {}, "scan_layers": False}
    other = dataclasses.replace(run, model=routed(way="gather", interleave=2), **other)
    claim(tmp_path, other)
    assert open_run(tmp_path) == other
    for changed in ({"dispatch": "mxfp8"}, {"balance": 0.5}):
        with pytest.raises(UserError, match="A run folder holds one run") as error:
            claim(tmp_path, dataclasses.replace(other, model=routed(**changed)))
        assert f"model.routing.{next(iter(changed))}" in error.value.seen and "way" not in error.value.seen


def test_stores_may_have_moved_and_nothing_else_of_the_data(tmp_path):
    part = lambda name, where: MixturePart(name=name, path=f"{where}/a", validation=f"{where}/b", weight=0.3)
    mixed = lambda *parts: dataclasses.replace(
        tiny(), data=dataclasses.replace(tiny().data, source=MixtureSource(parts=parts))
    )
    claim(tmp_path, mixed(part("web", "here"), part("code", "there")))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    web, code = part("web", "elsewhere"), part("code", "there")
    claim(tmp_path, mixed(web, code))
    assert open_run(tmp_path).data.source.parts == (web, code)
    for other in (dataclasses.replace(web, validation=None), dataclasses.replace(web, weight=0.5)):
        with pytest.raises(UserError, match="A run folder holds one run"):
            claim(tmp_path, mixed(other, code))


def test_a_part_that_differs_is_named(tmp_path):
    parts = tuple(MixturePart(name=name, path=f"stores/{name}", weight=0.5) for name in ("web", "code"))
    mixed = lambda *parts: dataclasses.replace(
        tiny(), data=dataclasses.replace(tiny().data, source=MixtureSource(parts=parts))
    )
    claim(tmp_path, mixed(*parts))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError) as error:
        claim(tmp_path, mixed(parts[0], dataclasses.replace(parts[1], weight=0.4)))
    assert error.value.seen == "data.source.parts.1.weight: 0.5 in the folder, 0.4 asked for"
    with pytest.raises(UserError) as error:
        claim(tmp_path, mixed(*parts, dataclasses.replace(parts[0], name="more")))
    assert error.value.seen.startswith("data.source.parts.2: null in the folder, {'name': 'more', ")


def test_a_run_does_not_become_shorter_than_it_is(tmp_path):
    claim(tmp_path, dataclasses.replace(tiny(), steps=40))
    claim(tmp_path, dataclasses.replace(tiny(), steps=20), done=20)
    with pytest.raises(UserError, match="A run cannot end before its last checkpoint") as error:
        claim(tmp_path, dataclasses.replace(tiny(), steps=19), done=20)
    assert (error.value.seen, error.value.where) == ("steps=19 asked for, 20 done", str(tmp_path))
    assert error.value.fix == "use --steps 20 or more, or a new --run-dir for a shorter run"
    assert open_run(tmp_path).steps == 20


def test_going_on_that_is_refused_leaves_the_run_as_it_was(tmp_path):
    claim(tmp_path, tiny())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    longer = dataclasses.replace(tiny(), steps=40)
    with pytest.raises(UserError), unchanged_if_refused(tmp_path):
        claim(tmp_path, longer)
        raise UserError("A rule.", seen=1, where="steps", fix="use 2")
    assert open_run(tmp_path) == tiny()
    with pytest.raises(UserError), unchanged_if_refused(tmp_path):
        claim(tmp_path, longer)
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')  # it went on for a step
        raise UserError("A rule.", seen=1, where="steps", fix="use 2")
    assert open_run(tmp_path) == longer


def test_a_process_that_writes_nothing_tells_the_same_of_a_refusal(tmp_path):
    claim(tmp_path, tiny())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    mistake = UserError("split evenly", seen="8 over 3", where="batch_size", fix="use --batch_size 9")
    with pytest.raises(UserError) as error, unchanged_if_refused(tmp_path, write=False):
        (tmp_path / "run.yaml").write_text("what the first process wrote")
        raise mistake
    assert error.value.fix.endswith("a resumed run keeps its batch_size")
    assert (tmp_path / "run.yaml").read_text() == "what the first process wrote"


@pytest.mark.parametrize(
    ("where", "seen", "among"),
    [
        ("batch_size", "12 over data=2 x microbatches=4 = 8", "--devices, --microbatches or --mesh sizes"),
        ("model.heads", "model.heads=4 over model=3", "--devices or --mesh sizes"),
        ("lengths", "batch_size=4 over data=2 x microbatches=4 = 8", "--devices, --microbatches or --mesh sizes"),
    ],
)
def test_a_resumed_run_is_told_what_it_may_change(where, seen, among, tmp_path):
    claim(tmp_path, tiny())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError) as error, unchanged_if_refused(tmp_path):
        raise UserError("Must divide.", seen=seen, where=where, fix=f"use --{where} 3 or 6, or --mesh sizes")
    assert error.value.fix == f"use {among} that divide it: a resumed run keeps its {where}"
    mistake = UserError("Is not.", seen=1, where="model.routing.slack", fix="use --model.routing.slack 2")
    with pytest.raises(UserError) as error, unchanged_if_refused(tmp_path):
        raise mistake
    assert error.value is mistake, "tokens may get to their experts in another way"


@pytest.mark.parametrize(
    ("where", "fix"),
    [
        ("precision.amax_history", "use --precision.amax_history 0"),
        ("precision.products", "use fp8, or fewer devices along model"),
        ("lengths", "give this length a batch_size of 3 or 6"),
        ("layout.compute.kv_heads", "use --layout.compute.kv_heads model, with --model.kv_heads 2"),
    ],
)
def test_what_only_some_meshes_can_have_is_mended_by_the_mesh_where_a_run_goes_on(where, fix, tmp_path):
    claim(tmp_path, tiny())
    with pytest.raises(UserError) as error, unchanged_if_refused(tmp_path):
        raise UserError("Cannot be.", seen=2, where=where, fix=fix)
    assert error.value.fix == fix, "a run that has not begun may change it"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError) as error, unchanged_if_refused(tmp_path):
        raise UserError("Cannot be.", seen=2, where=where, fix=fix)
    kept = "model.kv_heads" if "model.kv_heads" in fix else where
    assert error.value.fix == f"use a mesh that can, such as the one before: a resumed run keeps its {kept}"
    free = UserError("Cannot be.", seen=2, where="layout.context", fix="use --layout.context ring")
    with pytest.raises(UserError) as error, unchanged_if_refused(tmp_path):
        raise free
    assert error.value is free


@pytest.mark.parametrize("begun", [False, True])
def test_a_batch_that_does_not_divide_is_mended_by_the_mesh_where_a_run_goes_on(begun, tmp_path):
    claim(tmp_path, tiny())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' if begun else "")
    with pytest.raises(UserError, match="split evenly") as error, unchanged_if_refused(tmp_path):
        layout_of(tiny(), jax.devices()[:3])
    going_on = "use --devices or --mesh sizes that divide it: a resumed run keeps its batch_size"
    assert error.value.fix == (
        going_on if begun else "use --batch_size 6 or 9, or --mesh sizes or a number of devices that divide it"
    )


def test_a_new_folder_has_the_name_and_the_date_and_is_of_one_run(tmp_path):
    folder = new_folder(tiny(), tmp_path / "runs")
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", folder.name)
    assert [made(folder).name for _ in range(3)] == [folder.name, f"{folder.name}-2", f"{folder.name}-3"]


def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path):
    folder = tmp_path / os.fsdecode(b"a\xff")
    for opened in (check_path, open_run):
        with pytest.raises(UserError, match="The path of a run's folder must be valid UTF-8") as error:
            opened(folder)
        assert error.value.seen == repr(str(folder)) and error.value.fix == "rename it, or use another --run-dir"


def test_a_folder_that_tensorstore_would_name_otherwise_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "iso8859-1")
    check_path(tmp_path / "run")
    with pytest.raises(UserError, match="must be ASCII, unless the locale is of UTF-8") as error:
        check_path(tmp_path / "rün")
    assert error.value.seen.endswith("rün' in iso8859-1") and "LC_ALL to C.UTF-8" in error.value.fix
    with pytest.raises(UserError, match="A prompt must be valid UTF-8") as error:
        check_utf8("\udcc3\udca9", "A prompt must be valid UTF-8.", "--prompt")
    assert error.value.fix == "set the environment variable LC_ALL to C.UTF-8"


def test_a_folder_with_a_backslash_is_refused(tmp_path):
    for opened in (check_path, open_run):
        with pytest.raises(UserError, match="The path of a run's folder must contain no backslash") as error:
            opened(tmp_path / "a\\b")
        assert error.value.seen == str(tmp_path / "a\\b")


def test_a_folder_that_begins_like_an_option_is_named_so_that_a_shell_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    claim(folder := Path("-my run"), tiny())
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="A run folder holds one run") as error:
        claim(folder, dataclasses.replace(tiny(), seed=1))
    assert error.value.fix.endswith("resume what is there: trellis train './-my run'")


def test_what_is_no_run_is_refused(tmp_path):
    for folder, seen in ((tmp_path, "no run.yaml"), (tmp_path / "absent", "no such folder")):
        with pytest.raises(UserError, match=r"A run's folder must contain run\.yaml") as error:
            open_run(folder)
        assert (error.value.seen, error.value.where) == (seen, str(folder))


def test_a_folder_is_left_when_its_process_ends(tmp_path):
    assert not was_left(tmp_path), "nobody trained there"
    (tmp_path / ".lock").write_bytes(b"\xff")
    assert not was_left(tmp_path), "it names nobody"
    with alone(tmp_path):
        assert not was_left(tmp_path)
        with pytest.raises(UserError, match="Only one process"), alone(tmp_path):
            pass
        assert not was_left(tmp_path)
    assert was_left(tmp_path)
    (tmp_path / ".lock").write_text("another-machine")
    assert not was_left(tmp_path), "a machine does not see all locks of others"


def test_looking_at_a_folder_keeps_nobody_from_training(tmp_path, monkeypatch):
    with alone(tmp_path):
        pass
    looking = open(tmp_path / ".lock")
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda seconds: looking.close())
    with alone(tmp_path):
        assert looking.closed and not was_left(tmp_path)


def test_a_file_system_without_locks_is_told_and_trained_in(tmp_path, monkeypatch, capsys):
    def none(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with alone(tmp_path):
        pass
    assert not was_left(tmp_path)
    assert capsys.readouterr().err == (
        "WARNING: nothing keeps a second process from training in this folder: its file system has no locks "
        "([Errno 38] Function not implemented)\n"
    )


def test_one_process_at_a_time_trains_in_a_folder(tmp_path):
    with alone(tmp_path):
        with (
            pytest.raises(UserError, match="Only one process at a time can train in a run's folder") as error,
            alone(tmp_path),
        ):
            pass
        assert error.value.fix == "wait for it or stop it, or use another --run-dir"
    with alone(tmp_path):
        pass


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    for letter in "abc":
        (folder / f"{letter}.txt").write_text(letter * 4000)
        files = find_files([str(folder / f"{letter}.txt")])
        tokenize(FileSource(files=files), str(folder / letter), use_bytes=True, workers=1)
    return folder


def letters(batch):
    return {letter: int((np.asarray(batch.targets) == ord(letter)).sum()) for letter in "abc"}


def run_on(source, vocab=257, **data):
    model = dataclasses.replace(tiny().model, vocab=vocab)
    return dataclasses.replace(tiny(), model=model, batch_size=16, data=Data(source=source, sequence_length=16, **data))


@pytest.mark.slow
def test_a_store_is_read_and_another_one_validates(stores):
    corpus = open_corpus(run_on(StoreSource(path=str(stores / "a"), validation=str(stores / "b"))))
    assert letters(corpus.batches.batch(0))["a"] > 200 and letters(corpus.batches.batch(0))["b"] == 0
    chosen = corpus.validation["validation"]
    assert letters(chosen.batches.batch(0))["b"] > 200
    assert chosen.num_batches == 2, "the run's limit"
    assert corpus.tokenizer.decode([97]) == "a"
    assert open_corpus(run_on(StoreSource(path=str(stores / "a")))).validation == {}


@pytest.mark.slow
def test_the_shares_of_a_mixture_change_with_the_step(stores):
    parts = (
        MixturePart(
            name="first",
            path=str(stores / "a"),
            weight=(PartWeight(step=0, weight=3.0), PartWeight(step=10, weight=0.0)),
        ),
        MixturePart(name="second", path=str(stores / "b"), weight=1.0, validation=str(stores / "c")),
    )
    corpus = open_corpus(run_on(MixtureSource(parts=parts, block=16)))
    early, late = letters(corpus.batches.batch(0)), letters(corpus.batches.batch(10))
    assert 2.5 < early["a"] / early["b"] < 3.5 and late["a"] == 0 and late["b"] > 200
    assert list(corpus.validation) == ["second"]
    assert letters(corpus.validation["second"].batches.batch(0))["c"] > 200


def test_a_part_of_a_mixture_is_read_one_and_a_half_times(stores):
    parts = (
        MixturePart(name="first", path=str(stores / "a"), weight=1.0, epochs=1.5),
        MixturePart(name="second", path=str(stores / "b"), weight=1.0),
    )
    corpus = open_corpus(run_on(MixtureSource(parts=parts, block=16)))
    read = sum(letters(corpus.batches.batch(step))["a"] for step in range(100))
    assert abs(read - 1.5 * 4000) <= 32
    assert letters(corpus.batches.batch(100))["a"] == 0


def test_a_store_with_more_tokens_than_the_model_is_refused(stores):
    with pytest.raises(UserError, match="The model's vocabulary must include every token id of the store"):
        open_corpus(run_on(StoreSource(path=str(stores / "a")), vocab=200))


def test_a_text_of_more_tokens_than_the_model_is_refused_before_a_tokenizer_is_trained(monkeypatch):
    monkeypatch.setattr("trellis.train.corpus.embedded_stores", lambda **how: pytest.fail("a tokenizer is trained"))
    with pytest.raises(UserError, match="The model's vocabulary must include every token of the text") as error:
        open_corpus(run_on(EmbeddedSource(vocab=1024), vocab=512))
    assert error.value.fix == "use --model.vocab 1024 or more, or --data.source.vocab 512 or less"


def test_a_tokenizer_whose_documents_end_with_a_token_that_the_model_has_not_is_refused(stores, tmp_path):
    """Of a store without a tokenizer and without ends of documents, so that no other check finds it."""
    convert(open_store(stores / "a"), str(tmp_path / "flat"), to="seqax")
    named = str(stores / "a" / "tokenizer.json")
    run = run_on(StoreSource(path=str(tmp_path / "flat" / "train")), vocab=256, tokenizer=named)
    with pytest.raises(UserError, match="The model's vocabulary must include the token that ends a document") as error:
        open_corpus(run)
    assert error.value.seen == "<|endoftext|>, token 256, vocab=256" and "--model.vocab 257" in error.value.fix


def test_a_store_whose_tokenizer_is_damaged_is_not_read_as_one_without(stores, tmp_path):
    """It would have no samples, bytes counted as an average, and any tokenizer that the run names."""
    shutil.copytree(stores / "a", tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text((stores / "a" / "tokenizer.json").read_text()[:-9])
    with pytest.raises(UserError, match="A tokenizer must be a tokenizer.json"):
        open_corpus(run_on(StoreSource(path=str(tmp_path / "a")), vocab=300))


@pytest.mark.slow
def test_stores_of_another_tokenizer_are_refused(stores, tmp_path):
    """Beside the training store's own, and beside the tokenizer that a run names."""
    words = tmp_path / "words.txt"
    words.write_text("to be or not to be, " * 400)
    source = FileSource(files=find_files([str(words)]))
    other = tokenize(source, str(tmp_path / "other"), train_bpe=260, workers=1)
    mine, theirs = str(stores / "a"), str(tmp_path / "other")
    named = str(tmp_path / "other" / "tokenizer.json")
    for run in (
        run_on(StoreSource(path=mine, validation=theirs), vocab=300),
        run_on(StoreSource(path=mine), vocab=300, tokenizer=named),
    ):
        with pytest.raises(UserError, match="A run's data and its model must use the same tokenizer") as error:
            open_corpus(run)
        assert error.value.fix == "tokenize the corpus with the model's tokenizer"
    found = open_corpus(run_on(StoreSource(path=theirs), vocab=300, tokenizer=named)).tokenizer
    assert found.sha256 == other.tokenizer().sha256
    ends = Tokenizer(other.tokenizer().json, end_of_document="to")  # the same tokens, of which another ends documents
    (tmp_path / "dots.txt").write_text(". . . ." * 400)
    tokenize(tmp_path / "dots.txt", tmp_path / "dots", tokenizer=ends, workers=0)
    found = open_corpus(run_on(StoreSource(path=str(tmp_path / "dots")), vocab=300, tokenizer=named)).tokenizer
    assert found.end_of_document_text == "to"
    with pytest.raises(UserError, match="A run's data and its model must use the same tokenizer"):
        open_corpus(run_on(StoreSource(path=theirs, validation=str(tmp_path / "dots")), vocab=300, tokenizer=named))


@pytest.mark.parametrize("text", ["", "steps: [", "steps: 3\n", "\0", "- a\n"])
def test_a_spoiled_run_file_is_told_with_its_name(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        open_run(tmp_path)
    assert str(tmp_path / "run.yaml") in error.value.where
