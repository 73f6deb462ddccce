"""Corpora and stores behind a real S3-speaking server and a real web server, also when they misbehave."""

import gzip
import json

import numpy as np
import pytest

from tests.data.corpora import make_store, random_texts, stream, tree, write_jsonl
from tests.data.web import serve
from trellis.data import Batches, FileSource, Shuffle, find_files, open_store, tokenize
from trellis.data.store.damage import find_damage
from trellis.errors import UserError

TEXTS = random_texts(np.random.default_rng(11), 60)
END = {"max_epochs": 1, "pad_last": True}
OPTIONS = {"use_bytes": True, "workers": 0, "chunk_tokens": 256, "chunk_offsets": 16}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("trellis.data.storage.FIRST_PAUSE", 0.01)


@pytest.fixture
def web(tmp_path):
    with serve(tmp_path) as web:
        yield web


@pytest.fixture(scope="module")
def s3_server():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server, monkeypatch):
    import s3fs

    for name, value in {"AWS_ENDPOINT_URL": s3_server, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
                        "AWS_DEFAULT_REGION": "us-east-1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    fs.mkdir("corpora")
    yield fs
    fs.rm("corpora", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_s3_end_to_end(bucket, tmp_path):
    """Text from S3, the store to S3, batches from S3: as on the local disk, to the bit."""
    local = tmp_path / "in"
    local.mkdir()
    for i in range(3):
        lines = "".join(json.dumps({"text": t}) + "\n" for t in TEXTS[i * 20 : i * 20 + 20]).encode()
        (local / f"{i}.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
        bucket.pipe_file(f"corpora/in/{i}.jsonl.gz", (local / f"{i}.jsonl.gz").read_bytes())
    for paths in ("s3://corpora/in", "s3://corpora/in/*.jsonl.gz", [f"s3://corpora/in/{i}.jsonl.gz" for i in range(3)]):
        names = [file.name for file in find_files(paths)]
        assert names == [f"s3://corpora/in/{i}.jsonl.gz" for i in range(3)]
    source = FileSource(files=find_files("s3://corpora/in"))
    remote = tokenize(source, "s3://corpora/store", **OPTIONS)
    tokenize(source, tmp_path / "store", **OPTIONS)
    names = bucket.find("corpora/store")
    assert {n.removeprefix("corpora/store/"): bucket.cat_file(n) for n in names} == tree(tmp_path / "store")
    assert np.array_equal(remote.tokens(0, remote.num_tokens), stream(TEXTS))
    options = {"sequence_length": 32, "batch_size": 8, "seed": 1}
    there, here = (
        Batches(open_store("s3://corpora/store"), **options),
        Batches(open_store(tmp_path / "store"), **options),
    )
    assert np.array_equal(there.batch(5).targets, here.batch(5).targets)
    assert list(find_damage(remote)) == []
    assert np.array_equal(remote.document(7), open_store(tmp_path / "store").document(7))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_s3_interrupted_and_continued(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("trellis.data.tokenizing.formats.BLOCK_BYTES", 300)
    source = FileSource(files=find_files(write_jsonl(tmp_path / "in.jsonl", TEXTS)))
    tokenize(source, tmp_path / "whole", **OPTIONS)
    from trellis.data.storage import RemoteFolder

    original, writes = RemoteFolder.write, []

    def write(self, name, data):
        writes.append(name)
        if len(writes) in (9, 21, 40):
            raise KeyboardInterrupt
        original(self, name, data)

    monkeypatch.setattr(RemoteFolder, "write", write)
    interruptions = 0
    while True:
        try:
            tokenize(source, "s3://corpora/again", commit_seconds=0.0, **OPTIONS)
            break
        except KeyboardInterrupt:
            interruptions += 1
            with pytest.raises(UserError):
                open_store("s3://corpora/again")
    assert interruptions == 3
    found = {n.removeprefix("corpora/again/"): bucket.cat_file(n) for n in bucket.find("corpora/again")}
    assert found == tree(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_s3_without_the_bucket(bucket):
    with pytest.raises(UserError) as raised:
        find_files("s3://nowhere/at/all")
    assert raised.value.rule == "Every input must exist." and raised.value.fix == "check the URL and the credentials"
    with pytest.raises(UserError, match="A token store must be a Zarr group"):
        open_store("s3://corpora/none")


def test_a_store_behind_a_web_server(tmp_path, web):
    here = make_store(tmp_path, TEXTS, chunk_tokens=512)
    there = open_store(f"{web.url}/store")
    assert np.array_equal(there.tokens(0, there.num_tokens), here.tokens(0, here.num_tokens))
    web.requests.clear()
    there.tokens(100, 130)
    there.tokens(500, 520)  # over the end of a chunk
    assert [r for _, r in web.requests if r] == ["bytes=200-259", "bytes=1000-1023", "bytes=0-15"]
    options = {"sequence_length": 32, "batch_size": 8}
    assert np.array_equal(Batches(there, **options).batch(3).targets, Batches(here, **options).batch(3).targets)


def test_texts_behind_a_web_server(tmp_path, web):
    write_jsonl(tmp_path / "in.jsonl", TEXTS)
    source = FileSource(files=find_files(f"{web.url}/in.jsonl"))
    for ranges in (True, False):
        web.ranges = ranges
        store = tokenize(source, tmp_path / f"out{ranges}", **OPTIONS)
        assert np.array_equal(store.tokens(0, store.num_tokens), stream(TEXTS))


def test_a_url_with_a_query(tmp_path, web):
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    source = FileSource(files=find_files(f"{web.url}/in.jsonl.gz?download=true"))
    assert tokenize(source, tmp_path / "out", **OPTIONS).tokens(0, 2).tolist() == [ord("a"), 256]


def test_dropped_connections_are_tried_again(tmp_path, web):
    here = make_store(tmp_path, TEXTS)
    write_jsonl(tmp_path / "in.jsonl", TEXTS)
    web.drop = lambda number: number % 3 != 0
    there = open_store(f"{web.url}/store")
    assert np.array_equal(there.tokens(30, 500), here.tokens(30, 500))
    store = tokenize(FileSource(files=find_files(f"{web.url}/in.jsonl")), tmp_path / "out", **OPTIONS)
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(TEXTS))


def test_a_server_that_always_drops_connections(tmp_path, web):
    make_store(tmp_path, TEXTS)
    write_jsonl(tmp_path / "in.jsonl", TEXTS)
    source = FileSource(files=find_files(f"{web.url}/in.jsonl"))
    there = open_store(f"{web.url}/store")
    web.drop = lambda number: True
    for action in (lambda: there.tokens(0, 50), lambda: tokenize(source, tmp_path / "out", **OPTIONS)):
        with pytest.raises(UserError) as raised:
            action()
        assert raised.value.rule == "The server must answer every request in full."
        assert "(5 attempts to read)" in raised.value.seen and raised.value.where.startswith(web.url)
        assert raised.value.fix == (
            "check the network and the server, then run the same command again; finished work is kept"
        )
    assert not (tmp_path / "out").exists()
    web.drop = lambda number: False
    assert tokenize(source, tmp_path / "out", **OPTIONS).num_documents == len(TEXTS)


def test_a_server_that_is_gone(tmp_path):
    make_store(tmp_path, TEXTS)
    with serve(tmp_path) as web:
        there = open_store(f"{web.url}/store")
    with pytest.raises(UserError, match="The server must answer every request in full"):
        there.tokens(0, 50)


def test_a_store_needs_ranges(tmp_path, web):
    make_store(tmp_path, TEXTS)
    there = open_store(f"{web.url}/store")
    web.ranges = False
    with pytest.raises(UserError, match="A server of stored tokens must support byte ranges") as raised:
        there.tokens(0, 50)
    assert raised.value.seen == "132 bytes for a range of 100"


def test_damage_behind_a_web_server(tmp_path, web):
    make_store(tmp_path, TEXTS)
    chunk = tmp_path / "store" / "tokens" / "c" / "2"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    checked = open_store(f"{web.url}/store", check=True)
    with pytest.raises(UserError, match="must match its size and checksum"):
        checked.tokens(128, 130)
    chunk.unlink()
    with pytest.raises(UserError, match="the chunk is missing"):
        open_store(f"{web.url}/store").tokens(128, 130)


def test_nothing_at_the_url(web):
    with pytest.raises(UserError, match="Every input must exist"):
        find_files(f"{web.url}/none.jsonl")
    with pytest.raises(UserError, match="A token store must be a Zarr group"):
        open_store(f"{web.url}/none")


def test_protocols_that_need_a_package(monkeypatch):
    import fsspec

    def missing(url, **options):
        raise ImportError("Install gcsfs to access GCS")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError) as raised:
        find_files("gs://bucket/x")
    assert raised.value.fix == "pip install 'trellis[gcs]'"


def test_an_unknown_protocol():
    with pytest.raises(UserError, match="The protocol of a URL must be one that fsspec knows"):
        find_files("gopher://somewhere/x")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_packages_of_the_other_protocols_are_found():
    """gs:// and hf:// are reached through fsspec; without the network, that their file systems can be made."""
    import fsspec

    assert "gcs" in fsspec.get_filesystem_class("gs").__name__.lower()
    assert fsspec.get_filesystem_class("hf").__name__ == "HfFileSystem"


def test_whole_chunks_are_fetched_once(tmp_path, web):
    """With a shuffle by chunks, and enough of them kept, an epoch asks for every chunk once."""
    here = make_store(tmp_path, TEXTS, chunk_tokens=128)
    there = open_store(f"{web.url}/store", keep=4)
    options = {"sequence_length": 32, "batch_size": 4, "shuffle": Shuffle(block=4, window=2)} | END
    near, far = Batches(here, **options), Batches(there, **options)
    web.requests.clear()
    for step in range(near.num_steps):
        assert np.array_equal(near.batch(step).targets, far.batch(step).targets)
    whole = [path for path, asked in web.requests if asked is None]
    assert len(whole) == len(set(whole)) == -(-here.num_tokens // 128)
    small = [asked for _, asked in web.requests if asked]
    assert set(small) == {"bytes=254-255"}  # the token before the first row of a chunk
