from __future__ import annotations

import sys

import pytest

from offsphere.errors import ConfigError
from offsphere.search.stores import KINDS, open_store


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("pgvektor:postgresql://localhost/db", "did you mean pgvector?"),
        ("PgVector:postgresql://localhost/db", "did you mean pgvector?"),
        ("weaviate:http://localhost", "parquet:FILE.parquet"),
        ("some/folder", "unknown destination 'some/folder'"),
        ("onnx:folder", "offsphere export-onnx"),
        ("", "unknown destination ''"),
        ("lancedb", "expected lancedb:FOLDER#TABLE"),
        ("lancedb:", "expected lancedb:FOLDER#TABLE"),
        ("lancedb:#documents", "expected lancedb:FOLDER#TABLE"),
        ("lancedb:folder#", "expected lancedb:FOLDER#TABLE"),
        ("faiss:", "expected faiss:FILE.faiss"),
        ("parquet:s3://bucket/documents.parquet", "parquet cannot write to s3://"),
        ("faiss:gs://bucket/documents.faiss", "export to lancedb:s3://BUCKET/FOLDER#TABLE"),
        ("chroma:s3://bucket/folder", "expected chroma:http://HOST:8000"),
    ],
)
def test_a_target_that_names_no_destination(target, said):
    with pytest.raises(ConfigError) as caught:
        open_store(target)
    assert said in str(caught.value)


def test_every_kind_is_offered():
    with pytest.raises(ConfigError) as caught:
        open_store("nothing:here")
    assert all(form in str(caught.value) for _, form in KINDS.values())


@pytest.mark.parametrize(
    ("target", "folder", "name"),
    [
        ("lancedb:{}/vectors", "vectors", "documents"),
        ("lancedb:{}/vectors#other", "vectors", "other"),
        ("lancedb:{}/c#/vectors#other", "c#/vectors", "other"),
    ],
)
def test_the_name_is_behind_the_last_mark(target, folder, name, tmp_path, opened, xquad):
    opened(target.format(tmp_path)).create(3, xquad.stamp("dot"))
    assert (tmp_path / folder / f"{name}.lance").is_dir()


@pytest.mark.parametrize("name", ["plain.faiss", "with # mark.faiss"])
def test_a_file_has_no_name_besides_its_own(name, tmp_path, opened, xquad):
    opened(f"faiss:{tmp_path / name}").create(3, xquad.stamp("dot"))
    assert (tmp_path / name).is_file()


@pytest.mark.parametrize(("kind", "package"), [("lancedb", "lancedb"), ("faiss", "faiss"), ("pgvector", "psycopg")])
def test_a_missing_package_is_named_with_what_to_type(kind, package, target, monkeypatch):
    at = f"{kind}:somewhere"
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"'{package}'.*pip install 'offsphere\[{kind}\]'"):
        open_store(at)
