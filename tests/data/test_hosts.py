"""Real processes with `jax.distributed`: each reads its rows alone, and their number changes nothing in the order."""

import json
import socket
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.data.corpora import make_store, random_texts
from tests.train import forks
from trellis.data import Batches, Loader, Store, open_store


def main() -> int:
    """In a process of its own, one of several: prints the rows that its devices were given, and how many it read."""
    processes, index, port, url, start, stop = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 // int(processes))
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(index))
    read = []
    original = Store.shifted

    def shifted(self, begins, length):
        read.extend((begins // length).tolist())
        return original(self, begins, length)

    Store.shifted = shifted
    mesh = jax.make_mesh((4,), ("data",))
    batches = Batches(open_store(url), sequence_length=16, batch_size=8, seed=7)
    seen = {}
    with Loader(batches, NamedSharding(mesh, PartitionSpec("data")), start_step=int(start), prefetch=1) as loader:
        for step, batch in loader:
            if step >= int(stop):
                break
            assert batch.targets.shape == (8, 16)
            for shard in batch.targets.addressable_shards:
                for i, row in enumerate(np.asarray(shard.data)):
                    seen[f"{step} {shard.index[0].start + i}"] = row.tolist()
    print(json.dumps({"seen": seen, "read": len(read)}))
    return 0


def run_hosts(processes: int, url: str, start: int, stop: int) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("tests.data.test_hosts", processes)
    running = [forks.start(*words, index, port, url, start, stop) for index in range(processes)]
    found = []
    for process in running:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found


@pytest.mark.slow
def test_changing_the_hosts_in_the_middle_changes_nothing(tmp_path):
    store = make_store(tmp_path, random_texts(np.random.default_rng(0), 100))
    batches = Batches(store, sequence_length=16, batch_size=8, seed=7)
    at = 0
    for processes in (2, 1, 4):
        found = run_hosts(processes, store.url, at, at + 3)
        rows: dict[str, list] = {}
        for host in found:
            assert not set(host["seen"]) & set(rows)  # no row on two hosts
            assert host["read"] <= (3 + 3) * 8 // processes  # its own rows of these steps and of those read ahead
            rows |= host["seen"]
        for step in range(at, at + 3):
            expected = batches.batch(step).targets
            assert [rows[f"{step} {row}"] for row in range(8)] == expected.tolist()
        at += 3
