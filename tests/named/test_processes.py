"""Two processes that run one program of named arrays: values of the host are the same in both, or are refused."""

import json
import socket
import sys

import jax
import numpy as np
import pytest

import trellis as tr
from tests.train import forks


def said(call) -> str:
    """What a call returns, or how it refuses."""
    try:
        return str(call())
    except tr.MeshError as error:
        return str(error).split(": ")[0]


def main() -> int:
    """In a process of its own: a step on a mesh of both, and what is not the same in both."""
    port, index = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    same, own = np.arange(8.0, dtype=np.float32), np.arange(8.0, dtype=np.float32) + index
    layout = tr.Layout(tr.make_mesh(data=4), params={"embed": "data"}, compute={"batch": "data"})
    here = tr.named(jax.numpy.asarray(own), "embed")  # on a device of its own process
    with layout:
        rows = tr.from_numpy(same, "batch")
        sharding = layout.sharding(("batch",))
        parts = tr.named(jax.make_array_from_process_local_data(sharding, same.reshape(2, 4)[index]), "batch")
        times = lambda: tr.named_jit(lambda x, by: (x * by).sum())
        drawn = lambda key: tr.named_jit(lambda key: tr.random.normal(key, (tr.Axis("batch", 8),)).sum())(key)
        told = [
            said(rows.sum),
            said((rows - parts).sum),
            said(lambda: times()(rows, 2.0)),
            said(lambda: np.asarray(tr.reshard("batch/data -> batch", rows)).tolist()),
            said(lambda: repr(rows)),
            said(rows.tolist),
            said(lambda: tr.from_numpy(own, "batch")),
            said(lambda: tr.from_numpy(own, "other")),
            said(lambda: times()(rows, 1.0 + index)),
            said(lambda: times()(tr.named(own, "batch"), 1.0)),
            said(lambda: drawn(jax.random.key(index))),
            said(lambda: tr.shard(here)),
        ]
    print(json.dumps(told))
    return 0


@pytest.mark.slow
def test_values_of_the_host_are_the_same_in_all_processes_or_refused():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = [forks.start("tests.named.test_processes", port, index) for index in (0, 1)]
    for index, process in enumerate(running):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        differs = (
            "values that are given to a mesh of several processes must be the same in all of them, got {} in "
            f"process {index}, which is another in process 1 than in process 0, in {{}}"
        )
        assert json.loads(out.splitlines()[-1]) == [
            "f32[]\n28.0",
            "f32[]\n0.0",
            "f32[]\n56.0",
            str([float(i) for i in range(8)]),
            "f32[batch/data=8]",
            "values of which other processes have a part cannot be read, got f32[batch/data=8], in np.asarray",
            differs.format("float32[8]", "from_numpy"),
            differs.format("float32[8]", "from_numpy"),
            differs.format(1.0 + index, "named_jit"),
            differs.format("float32[8]", "named_jit"),
            differs.format("key<fry>[]", "named_jit"),
            differs.format("float32[8]", "shard"),
        ]
