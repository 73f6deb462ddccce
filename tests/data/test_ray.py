"""Tokenizing on a real local Ray cluster of several worker processes."""

import sys

import numpy as np
import pytest

from tests.data.corpora import random_texts, tree, write_jsonl
from trellis.data import FileSource, find_files, tokenize
from trellis.errors import UserError

if sys.version_info < (3, 14):
    import ray
else:  # there may be no build of Ray for the newest Python
    ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # how Ray starts its processes
]


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_the_same_store_to_the_bit(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("trellis.data.tokenizing.formats.BLOCK_BYTES", 3_000)
    texts = random_texts(np.random.default_rng(3), 400, longest=300)
    source = FileSource(files=find_files(write_jsonl(tmp_path / "in.jsonl", texts)))
    options = {"train_bpe": 300, "chunk_tokens": 1024, "chunk_offsets": 32}
    tokenize(source, tmp_path / "here", workers=0, **options)
    tokenize(source, tmp_path / "there", workers="ray", **options)
    assert tree(tmp_path / "here") == tree(tmp_path / "there")


def test_errors_come_back(cluster, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\nbroken\n')
    (tmp_path / "rules.py").write_text("import sys\ndef keep(record):\n    raise KeyError('jax' in sys.modules)\n")
    source = FileSource(files=find_files(tmp_path / "in.jsonl"))
    with pytest.raises(UserError, match="Every document must be readable"):
        tokenize(source, tmp_path / "a", workers="ray", use_bytes=True)
    # And JAX was not imported there, which takes seconds on each core of a cluster.
    with pytest.raises(UserError, match=r"A filter must return true or false for every record(?s:.)*KeyError.*False"):
        tokenize(source, tmp_path / "b", workers="ray", use_bytes=True, filter=f"{tmp_path}/rules.py:keep")


def test_a_worker_that_dies(cluster, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "rules.py").write_text("import os\ndef keep(record):\n    os._exit(3)\n")
    source = FileSource(files=find_files(tmp_path / "in.jsonl"))
    with pytest.raises(UserError, match="A tokenizing worker must not die") as raised:
        tokenize(source, tmp_path / "c", workers="ray", use_bytes=True, filter=f"{tmp_path}/rules.py:keep")
    assert "continues where it left off" in raised.value.fix
