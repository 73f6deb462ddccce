"""Processes of a run that were not started alike, do not share a folder, or read other text: all of them say so."""

import dataclasses
import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from tests.train import forks
from tests.train.small import started
from trellis.data import FileSource, find_files, open_store, tokenize
from trellis.data.store.identity import check_identities, identity
from trellis.errors import UserError
from trellis.optim import AdamW
from trellis.recipes import tiny
from trellis.run.config import Distributed
from trellis.run.folder import alone
from trellis.train.distributed import initialize
from trellis.train.together import alone_together, check_alike, check_devices, check_folder, check_text


def checks(process: int, folder: Path) -> list:
    """What one process is told: first where both agree, then where they do not."""
    other = dataclasses.replace(tiny(), optimizer=AdamW(learning_rate=0.5)) if process else tiny()
    many = Distributed(coordinator="host:1", processes=2 + process, process=process)
    own = [{"": {"first": "a", "tokens": 5}}, {"": {"first": "b", "tokens": 5}}]
    calls = [
        lambda: check_folder(folder),
        lambda: check_alike(tiny()),
        lambda: check_text(own[0]),
        lambda: check_folder(folder / str(process), wait=0.2),
        lambda: check_alike(other),
        lambda: check_alike(tiny(), until=5 if process else None),
        lambda: check_alike(dataclasses.replace(tiny(), distributed=many)),
        lambda: check_text(own[process]),
        lambda: alone_together(folder / "held").__enter__(),
    ]
    if process == 0:
        (folder / "0").mkdir()
    told = []
    for call in calls:
        try:
            told.append(call())
        except UserError as error:
            told.append([error.rule, error.seen, error.where])
    return told


@pytest.mark.slow
def test_all_processes_are_told_what_differs(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with alone(tmp_path / "held"):
        processes = [forks.start("tests.train.test_together", address, tmp_path, i) for i in (0, 1)]
        found = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in processes]
    told = [
        None,
        None,
        None,
        [
            "All processes must see the run's folder.",
            f"process 1 does not see in {tmp_path / '1'} what process 0 writes in {tmp_path / '0'}",
            "--run-dir",
        ],
        [
            "All processes of a run must be started with the same options.",
            "optimizer.learning_rate: 0.01 in process 0, 0.5 in process 1",
            "process 1",
        ],
        [
            "All processes of a run must be started with the same options.",
            "until: null in process 0, 5 in process 1",
            "process 1",
        ],
        [
            "All processes of a run must be started with the same options.",
            "distributed.processes: 2 in process 0, 3 in process 1",
            "process 1",
        ],
        [
            "All processes of a run must read the same tokens.",
            "different tokens in process 1 than in process 0",
            "process 1",
        ],
        [
            "Only one process at a time can train in a run's folder.",
            "another process, which is still training",
            str(tmp_path / "held"),
        ],
    ]
    assert found == [told, told]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "held"] and not any((tmp_path / "0").iterdir())


def test_processes_have_as_many_devices(monkeypatch):
    devices = lambda *counts: [SimpleNamespace(process_index=i) for i, n in enumerate(counts) for _ in range(n)]
    monkeypatch.setattr(jax, "devices", lambda: devices(2, 2, 2))
    check_devices()
    monkeypatch.setattr(jax, "devices", lambda: devices(1, 2, 2))
    with pytest.raises(UserError, match="All processes of a run must have the same number of devices.") as error:
        check_devices()
    assert error.value.seen == "1 in process 0, 2 in process 1, 2 in process 2"
    assert error.value.fix == "start all with --devices 1, or with the same number of accelerators"


@pytest.mark.slow
def test_a_process_that_is_lost_before_the_first_step_ends_the_others(tmp_path):
    """By one message, and at once: nothing waits for it."""
    store_of("a line of text\n" * 2000, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = {
        "devices": 1, "batch_size": 2, "evaluation.batches": 1, "cpu.measure": "false",
        "distributed.coordinator": address, "distributed.processes": 2,
        "data.source": f"{{kind: store, path: {tmp_path / 'store'}}}",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    words = ["train", "tiny", "--run-dir", tmp_path / "run", *words, "--distributed.process"]
    first, second = (started(*words, i) for i in (0, 1))
    while "\nfolder" not in first.said("out") and first.poll() is None:
        time.sleep(0.005)
    second.kill()
    said, error = first.communicate(timeout=100)
    second.communicate(timeout=60)
    assert first.returncode == 3, said + error
    assert "All processes of a run must keep running." in error and "Traceback" not in error
    assert "where: no checkpoint was written yet" in error


def store_of(text: str, folder: Path):
    (folder / "in.txt").write_text(text)
    tokenize(FileSource(files=find_files(folder / "in.txt")), folder / "store", use_bytes=True, workers=0, restart=True)
    return open_store(folder / "store")


def test_a_run_goes_on_with_the_text_that_it_began_with(tmp_path):
    text = "".join(f"line {i}\n" for i in range(3000))
    store = store_of(text, tmp_path)
    before = {"": identity(store)}
    check_identities(before, {"": identity(store_of(text, tmp_path))}, {"": "store"})
    check_identities({}, before, {"": "store"})  # of a checkpoint that does not say
    growing = {"first": before[""]["first"]}
    check_identities({"": growing}, before, {"": "store"})
    for other, seen in (
        (text + "more\n", "other tokens: 28,891 tokens before, 28,896 tokens now"),
        (text[:-3] + "x" + text[-2:], "other tokens: 28,891 tokens before, 28,891 tokens now"),
        ("L" + text[1:], "other tokens: 28,891 tokens before, 28,891 tokens now"),
    ):
        with pytest.raises(UserError, match="A resumed run must read the same tokens as before") as error:
            check_identities(before, {"": identity(store_of(other, tmp_path))}, {"": "store"})
        assert (error.value.seen, error.value.where) == (seen, "store")


def test_a_run_goes_on_with_what_counted_in_its_loss(tmp_path):
    talk = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]

    def store_with(weight: int):
        (tmp_path / "in.jsonl").write_text(json.dumps({"messages": [talk[0], talk[1] | {"weight": weight}]}))
        return tokenize(tmp_path / "in.jsonl", tmp_path / "chat", use_bytes=True, chat=True, workers=0, restart=True)

    before = {"": identity(store_with(1))}
    check_identities(before, {"": identity(store_with(1))}, {"": "chat"})
    with pytest.raises(UserError, match="the same tokens, of which others count in the loss"):
        check_identities(before, {"": identity(store_with(0))}, {"": "chat"})


def main() -> int:
    """One of two processes: prints what it is told."""
    initialize(coordinator=sys.argv[1], processes=2, process=int(sys.argv[3]))
    print("\n" + json.dumps(checks(int(sys.argv[3]), Path(sys.argv[2]))))
    return 0
