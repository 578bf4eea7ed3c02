from __future__ import annotations

from pathlib import Path

import pytest

from offsphere.diagnosis.subject import Encoder, open_bare
from offsphere.errors import DataError, UsageError
from offsphere.search.sources import EncodedDocuments


def test_nothing_is_written_where_a_line_is_malformed(corpus, prompted_model, target, tmp_path):
    folder = corpus(["sea", "ice"])
    with Path(folder, "corpus.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"_id": "x"}\n')
    with pytest.raises(DataError, match=r"corpus.jsonl:3"):
        EncodedDocuments(open_bare(prompted_model, None, None, "cpu"), [folder])
    assert not (tmp_path / "destinations").exists()


def test_an_id_in_two_sources_is_an_error(corpus, prompted_model):
    first, second = corpus(["sea"], "first"), corpus(["sea"], "second")
    with pytest.raises(DataError, match=r"document 'doc/0 é' is in .*first as well"):
        EncodedDocuments(open_bare(prompted_model, None, None, "cpu"), [first, second])


def test_prompts_of_collections_come_before_the_models(corpus, prompted_model):
    first, second = corpus(["sea"], "first"), corpus(["sea"], "second")
    Path(first, "collection.yaml").write_text('prompts: {document: "of "}', encoding="utf-8")
    encoder = open_bare(prompted_model, None, None, "cpu")
    assert EncodedDocuments(encoder, [first]).stamp.prompt == "of "
    assert EncodedDocuments(encoder, [second]).stamp.prompt == "passage : "
    assert EncodedDocuments(encoder, [first], prompt="").stamp.prompt == ""
    Path(second, "corpus.jsonl").write_text('{"_id": "other", "text": "ice"}', encoding="utf-8")
    assert EncodedDocuments(encoder, [first, second]).stamp.prompt == "of "
    Path(second, "collection.yaml").write_text('prompts: {query: "? ", document: "in "}', encoding="utf-8")
    with pytest.raises(DataError, match=r"document prompt 'in ', another one 'of '.*--document-prompt"):
        EncodedDocuments(encoder, [first, second])


def test_a_model_that_says_nothing_is_asked_for(static, corpus):
    with pytest.raises(UsageError, match="does not say which similarity it was trained with"):
        EncodedDocuments(Encoder("x", static, [], None), [corpus(["sea"])])
