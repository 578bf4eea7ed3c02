"""Ray: a local cluster of two workers, of which one is killed midway, gives the bytes of one process."""

from __future__ import annotations

import os
import signal
import warnings

import numpy as np
import psutil
import pytest

from offsphere import Similarity, load_collection
from offsphere.encoding import encode_collection, open_embeddings
from offsphere.encoding.cluster import rank_on_ray
from offsphere.encoding.storage import MATRIX
from offsphere.errors import EmbeddingsError
from offsphere.evaluation.ranking import EmbeddedCollection, rank
from offsphere.progress import Silent

ray = pytest.importorskip("ray")


@pytest.fixture
def cluster(tmp_path_factory):
    """Two workers on this machine, on a port and in a folder of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
    yield
    ray.shutdown()


class KillOne(Silent):
    """Kills a worker while it encodes, once."""

    def __init__(self):
        self.killed: list[psutil.Process] = []

    def start(self, what, total):
        return self.kill

    def kill(self, texts):
        if self.killed:
            return
        workers = [one for one in psutil.Process().children(recursive=True) if one.name().startswith("ray::task")]
        if workers:
            self.killed.append(workers[0])
            os.kill(workers[0].pid, signal.SIGKILL)


def test_encode_and_search_on_two_workers_of_which_one_is_killed(cluster, table, collection, tmp_path):
    source, kill = collection(600), KillOne()
    address = f"file://{tmp_path}/far"
    settings = {"shard_size": 20, "ray": True, "progress": kill}
    (there,) = encode_collection(table, source, address, **settings)
    assert kill.killed and not kill.killed[0].is_running()
    (here,) = encode_collection(table, source, tmp_path / "here", shard_size=20)
    assert there.encoded == here.encoded == 599 - 0
    checksums = [[shard.checksum for _, shard in sorted(done.manifest.shards.items())] for done in (there, here)]
    assert checksums[0] == checksums[1] and len(checksums[0]) == 30
    encode_collection(table, source, tmp_path / "local", **settings)
    assert (tmp_path / "local" / MATRIX).read_bytes() == (tmp_path / "here" / MATRIX).read_bytes()
    (again,) = encode_collection(table, source, address, **settings)
    assert (again.kept, again.encoded) == (30, 0)

    encode_collection(table, source, tmp_path / "queries", sides=("query",))
    queries, documents = open_embeddings(tmp_path / "queries"), open_embeddings(address)
    (source / "collection.yaml").write_text("excluded:\n  q0: [d0, d1, d2]\n  q3: [d5]\n")
    loaded = load_collection(source)
    embedded = EmbeddedCollection(loaded, queries.of(loaded.queries), documents.of(loaded.documents))
    for name in ("cosine", "dot"):
        similarity = Similarity.parse(name)
        found = rank_on_ray(queries, documents, loaded, similarity, k=50)
        assert found.run() == rank(embedded, similarity, k=50).run()
        assert list(map(list, found.run().values())) == list(map(list, rank(embedded, similarity, k=50).run().values()))
    assert "d0" not in found.run()["q0"]
    with (tmp_path / "far" / "shards" / "000001.npy").open("r+b") as file:
        file.seek(200)
        file.write(b"x")
    with pytest.raises(EmbeddingsError, match=r"shard 1 of .* is damaged"):
        rank_on_ray(queries, open_embeddings(address), loaded, similarity, k=50)
    assert np.isfinite(found.scores).all()
