"""LanceDB on object storage: a server on this machine that speaks S3's protocol over HTTP."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest

from offsphere.errors import StoreError
from offsphere.similarity import Similarity


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The URL of the server, which has one bucket, ``bucket``."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
    yield url
    server.stop()


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, with credentials for it where every client of S3 looks for them."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    return endpoint


def test_a_table_in_a_bucket_is_used_as_one_in_a_folder(s3, opened, xquad):
    at, similarity = "lancedb:s3://bucket/some/folder#documents", Similarity.parse("gamma_q=1,gamma_d=0.5")
    records = xquad.records(similarity)
    store = opened(at)
    assert not store.exists()
    store.create(xquad.documents.shape[1], xquad.stamp(similarity))
    for start in range(0, len(records), 60):
        store.write(records[start : start + 60])
    store.write(records[:10])  # again
    store.delete([records[3].id])
    store.write([records[3]])
    store.close()  # which joins the files of all these writes
    with urllib.request.urlopen(f"{s3}/bucket?list-type=2&prefix=some/folder/documents.lance/data") as listing:
        assert b".lance</Key>" in listing.read()  # nowhere else

    live = opened(at)
    assert (live.exists(), live.metric(), live.count()) == (True, "ip", len(records))
    assert live.stamp() == xquad.stamp(similarity)
    assert live.digests(xquad.ids) == {record.id: record.digest for record in records}
    exact = similarity.scores(xquad.queries.astype(np.float64), xquad.documents.astype(np.float64))
    for answer, scores in zip(live.search(similarity.prepare_query(xquad.queries), 10), exact, strict=True):
        assert [hit.id for hit in answer] == [xquad.ids[row] for row in np.argsort(-scores)[:10]]
        np.testing.assert_allclose([hit.score for hit in answer], np.sort(scores)[::-1][:10], rtol=1e-4)


def test_a_bucket_that_is_not_there_is_named(s3, opened, xquad):
    with pytest.raises(StoreError, match=r"lancedb:s3://nowhere/folder#documents: .*NoSuchBucket"):
        opened("lancedb:s3://nowhere/folder").create(3, xquad.stamp("dot"))
