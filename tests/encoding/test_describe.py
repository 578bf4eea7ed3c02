"""Row 6 of the cases: the lengths of any model, folder or array in numbers."""

from __future__ import annotations

import numpy as np
import pytest

from offsphere.data.documents import read_documents
from offsphere.encoders import encode
from offsphere.encoding import encode_collection
from offsphere.encoding.describe import describe
from offsphere.encoding.embeddings import Lengths
from offsphere.errors import DataError, EmbeddingsError, EncoderError, UsageError
from offsphere.similarity import norms


def test_an_array(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]], np.float16))
    found = describe(str(tmp_path / "a.npy"))
    assert found.kind == "array" and found.lengths == Lengths(3, 1, 3.0, pytest.approx(2 / 3), 1.0, 5.0)
    assert found.lines[-1] == "length of 3 embeddings: mean 3, CV 0.667, min 1, max 5, 1 of length 0 aside"
    np.save(tmp_path / "b.npy", np.arange(3))
    with pytest.raises(DataError, match=r"b\.npy: is \(3,\) of int64; expected floating numbers"):
        describe(str(tmp_path / "b.npy"))
    with pytest.raises(DataError, match=r"c\.npy: cannot be read"):
        describe(str(tmp_path / "c.npy"))


def test_a_folder(table, collection, tmp_path):
    encode_collection(table, collection(), tmp_path / "out", sides=("query", "document"), prompts={"query": "why : "})
    found = describe(str(tmp_path / "out"), side="query")
    assert found.kind == "embeddings" and found.facts["prompts"] == {"query": "why : "}
    assert found.lengths == Lengths.of(norms(np.load(tmp_path / "out" / "query" / "embeddings.npy")))
    assert "prompts: query 'why : '" in found.lines
    with pytest.raises(EmbeddingsError, match="has query and document embeddings"):
        describe(str(tmp_path / "out"))
    with pytest.raises(UsageError, match="--data gives texts to a model"):
        describe(str(tmp_path / "out" / "query"), data="elsewhere")


def test_a_model_with_a_normalize_module(static, save, collection):
    from sentence_transformers.sentence_transformer.modules import Normalize

    static.append(Normalize())
    source, folder = collection(), str(save(static))
    found = describe(folder, str(source))
    assert found.kind == "model" and found.facts["normalize_modules_taken_off"] == 1
    assert found.facts["declared_similarity"] == "cosine"
    del static[-1]
    texts = [one.passage for one in read_documents(source) if one.passage]
    expected = Lengths.of(norms(encode(static, texts, "document")))
    assert (found.lengths.count, found.lengths.mean) == (29, pytest.approx(expected.mean, rel=1e-5))
    assert describe(folder).facts["texts"].endswith("built-in texts; --data for yours")


def test_nothing_there(tmp_path):
    with pytest.raises(EncoderError, match="cannot open the encoder"):
        describe(str(tmp_path / "none"))
