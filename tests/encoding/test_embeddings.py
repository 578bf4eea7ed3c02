"""What a folder of embeddings gives, and when it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest

from offsphere import load_collection
from offsphere.diagnosis.subject import open_bare
from offsphere.encoders import encode
from offsphere.encoding import encode_collection, open_embeddings
from offsphere.encoding.embeddings import Lengths
from offsphere.encoding.storage import MATRIX, RemoteFolder, open_storage
from offsphere.errors import EmbeddingsError


@pytest.fixture
def made(table, collection, tmp_path):
    encode_collection(table, collection(), tmp_path / "out", sides=("query", "document"), shard_size=8)
    return tmp_path / "out"


def test_ids_matrix_and_norms(made, table, tmp_path):
    """T-I2 as well: the length of an empty document is 0, and no part of any number on lengths."""
    documents, queries = open_embeddings(made / "document"), open_embeddings(made, "query")
    assert (len(documents), len(queries)) == (30, 6)
    assert documents.ids[:2] == ["d0", "d1"] and isinstance(documents.matrix, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        documents.matrix[0] = 0
    np.testing.assert_allclose(documents.norms, np.linalg.norm(documents.matrix, axis=1), rtol=1e-6)
    assert documents.lengths.zero == 1 and documents.lengths.min > 0 and documents.lengths.cv > 0.1
    assert documents.lengths.mean == pytest.approx(float(documents.norms[documents.norms > 0].mean()), rel=1e-6)
    assert "norm" not in {path.stem for path in made.rglob("*")}  # computed, never stored
    bare = open_bare(table, None, None, "cpu").model
    assert open_embeddings(made, "document", model=bare, prompt="", similarity="dot").ids == documents.ids


def test_rows_of_a_collection(made, collection, tmp_path, table):
    loaded = load_collection(tmp_path / "collection")
    documents = open_embeddings(made, "document")
    texts = dict(reversed(loaded.documents.items()))
    np.testing.assert_array_equal(documents.of(texts), documents.matrix[::-1])
    some = {"d3": loaded.documents["d3"]}
    np.testing.assert_array_equal(documents.of(some), documents.matrix[3:4])
    with pytest.raises(EmbeddingsError, match="no embedding of 'd99', nor of 0 others"):
        documents.rows_of(loaded.documents | {"d99": "moon"})
    with pytest.raises(EmbeddingsError, match="made of other texts: one of rows 8 to 15"):
        documents.rows_of(loaded.documents | {"d9": "moon ice"})


def test_what_is_refused(made, model, table, tmp_path):
    bare, longer = open_bare(model, None, None, "cpu").model, open_bare(table, 100, None, "cpu").model
    for other in (bare, longer):
        with pytest.raises(EmbeddingsError, match=r"this is another model .* or another length limit"):
            open_embeddings(made, "document", model=other)
    with pytest.raises(EmbeddingsError, match="they are of the side document, not query"):
        open_embeddings(made / "document", "query")
    with pytest.raises(EmbeddingsError, match="the prompt was '', not 'why: '"):
        open_embeddings(made, "query", prompt="why: ")
    with pytest.raises(EmbeddingsError, match="has query and document embeddings"):
        open_embeddings(made)
    with pytest.raises(EmbeddingsError, match="has no embeddings; make some with: offsphere encode"):
        open_embeddings(tmp_path)


def test_a_similarity_that_needs_length_where_there_is_none(static, save, collection, tmp_path):
    weights = static[0].embedding.weight.data
    weights /= weights.norm(dim=1, keepdim=True)
    source = collection(4)
    (source / "corpus.jsonl").write_text(
        "".join(f'{{"_id": "d{i}", "text": "{w}"}}\n' for i, w in enumerate(["moon", "ice"]))
    )
    encode_collection(str(save(static)), source, tmp_path / "out")
    assert open_embeddings(tmp_path / "out").lengths.unit
    assert "there is no length to keep" in str(open_embeddings(tmp_path / "out").lengths)
    for name in ("dot", "qnorm"):
        with pytest.raises(EmbeddingsError, match=f"all have the same length, and {name} ranks by the length"):
            open_embeddings(tmp_path / "out", similarity=name)
    for name in ("cosine", "dnorm"):
        open_embeddings(tmp_path / "out", similarity=name)


def test_damage_is_named(made):
    folder = made / "document"
    (folder / "ids.txt").write_text("d0\n")
    with pytest.raises(EmbeddingsError, match=r"ids\.txt is missing or damaged"):
        _ = open_embeddings(folder).ids
    np.save(folder / MATRIX, np.zeros((2, 2)))
    with pytest.raises(EmbeddingsError, match=r"is \(2, 2\) of float64; expected \(30, 16\)"):
        _ = open_embeddings(folder).matrix
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 2}))
    with pytest.raises(EmbeddingsError, match="has format 2, and this version of offsphere reads 1"):
        open_embeddings(folder)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(EmbeddingsError, match="is damaged"):
        open_embeddings(folder)


def test_at_an_address_every_shard_has_a_file(made, table, tmp_path):
    """Any fsspec address; here one of the local file system."""
    address = f"file://{tmp_path}/far"
    for encoded in (30, 0):
        (done,) = encode_collection(table, tmp_path / "collection", address, shard_size=8)
        assert done.encoded == encoded - (encoded > 0)
    assert sorted(path.name for path in (tmp_path / "far" / "shards").iterdir()) == [f"00000{i}.npy" for i in range(4)]
    assert np.load(tmp_path / "far" / "shards" / "000003.npy").shape == (6, 16)
    far, near = open_embeddings(address), open_embeddings(made, "document")
    np.testing.assert_array_equal(far.matrix, near.matrix)
    assert far.ids == near.ids
    assert [shard.checksum for shard in far.manifest.shards.values()] == [
        shard.checksum for shard in near.manifest.shards.values()
    ]
    with (tmp_path / "far" / "shards" / "000001.npy").open("r+b") as file:
        file.seek(200)
        file.write(b"x")
    (done,) = encode_collection(table, tmp_path / "collection", address)
    assert (done.kept, done.damaged, done.encoded) == (3, [1], 8)


def test_an_object_store_in_memory():
    storage = open_storage("memory://bucket/name")
    assert isinstance(storage, RemoteFolder) and storage.read("manifest.json") is None
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    storage.write_rows(4, 8, rows)
    np.testing.assert_array_equal(storage.read_rows(4, 8, 10, 3), rows)
    assert storage.read_rows(5, 10, 12, 3) is None and storage.read_rows(4, 8, 11, 3) is None
    with pytest.raises(EmbeddingsError, match="cannot open nothing://a"):
        open_storage("nothing://a")


def test_lengths_in_numbers():
    lengths = Lengths.of(np.array([0.0, 1.0, 3.0]))
    assert lengths == Lengths(3, 1, 2.0, 0.5, 1.0, 3.0)
    assert str(lengths) == "length of 3 embeddings: mean 2, CV 0.5, min 1, max 3, 1 of length 0 aside"
    assert str(Lengths.of(np.zeros(2))) == "2 embeddings, all of length 0"


def test_the_rows_are_those_of_encode(made, table):
    bare = open_bare(table, None, None, "cpu").model
    queries = open_embeddings(made, "query")
    loaded = load_collection(made.parent / "collection")
    np.testing.assert_allclose(queries.of(loaded.queries), encode(bare, [*loaded.queries.values()], "query"), rtol=1e-5)
