"""What ``save_encoder`` writes: how it ranks, where it loads, and that it is all there or not at all."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from offsphere.data import Collection
from offsphere.encoders import declared_similarity, open_encoder, save_encoder
from offsphere.errors import EncoderError
from offsphere.evaluation import rank
from offsphere.evaluation.embedding import embed
from offsphere.modules import LearnedSimilarity
from offsphere.similarity import FIXED, Similarity

CARD = "# Ünlike any other\n\ns(q, d) = (q . d) / (|q|^1 |d|^0)\n"
PROMPTS = {"query": "query: ", "document": "passage: "}

WITHOUT_OFFSPHERE = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "offsphere":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
try:
    import offsphere
except ModuleNotFoundError:
    absent = True
else:
    absent = False

from sentence_transformers import SentenceTransformer

request = json.load(sys.stdin)
found = {}
for name, folder in request["fixed"].items():
    model = SentenceTransformer(folder, device="cpu")
    queries, documents = model.encode_query(request["queries"]), model.encode_document(request["documents"])
    scores = model.similarity(queries, documents)
    found[name] = {"metric": model.similarity_fn_name, "order": scores.argsort(dim=1, descending=True).tolist()}
try:
    SentenceTransformer(request["learned"], device="cpu", trust_remote_code=True)
except ImportError as error:
    refused = str(error)
else:
    refused = None
print(json.dumps({"absent": absent, "found": found, "refused": refused, "loaded": "offsphere" in sys.modules}))
"""


@pytest.fixture(scope="module")
def collection(sentences) -> Collection:
    texts = sentences(60, 0)
    documents = {f"d{i}": text for i, text in enumerate(texts[:50])}
    queries = {f"q{i}": text for i, text in enumerate(texts[50:])}
    return Collection("made", "test", documents, queries, {query: {"d0": 1} for query in queries})


def our_order(model: SentenceTransformer, collection: Collection, similarity: Similarity) -> list[list[int]]:
    return rank(embed(model, collection), similarity, len(collection.documents)).indices.tolist()


def test_ranks_identically_where_offsphere_is_not_installed(transformer, static, collection, tmp_path):
    """One process for all of them, because it takes seconds to import sentence-transformers."""
    folders, expected = {}, {}
    for kind, model in (("transformer", transformer), ("static", static)):
        model.prompts.update(PROMPTS)
        for name in FIXED:
            folder = tmp_path / f"{kind}-{name}"
            save_encoder(model, folder, Similarity.parse(name), CARD)
            folders[folder.name] = str(folder)
            expected[folder.name] = our_order(model, collection, Similarity.parse(name))
    static.append(LearnedSimilarity(Similarity(0.3, 0.8, learned=True)))
    save_encoder(static, tmp_path / "learned", Similarity(0.3, 0.8, learned=True), CARD)
    request = {
        "fixed": folders,
        "learned": str(tmp_path / "learned"),
        "queries": [*collection.queries.values()],
        "documents": [*collection.documents.values()],
    }
    done = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_OFFSPHERE], input=json.dumps(request), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["absent"] and not answer["loaded"]
    assert "offsphere" in answer["refused"]  # the blocker works: the one that needs offsphere does not load
    for folder, order in expected.items():
        assert answer["found"][folder]["order"] == order, folder
        assert answer["found"][folder]["metric"] == ("cosine" if folder.endswith(("cosine", "dnorm")) else "dot")
    for kind in ("transformer", "static"):
        assert expected[f"{kind}-cosine"] == expected[f"{kind}-dnorm"] != expected[f"{kind}-dot"]


@pytest.mark.parametrize("name", FIXED)
def test_the_stored_metric_and_card(encoder, tmp_path, name):
    folder = tmp_path / "deep" / "er" / "model"
    save_encoder(encoder, folder, Similarity.parse(name), CARD)
    stored = json.loads((folder / "config_sentence_transformers.json").read_text(encoding="utf-8"))
    assert stored["similarity_fn_name"] == {"cosine": "cosine", "dnorm": "cosine", "dot": "dot", "qnorm": "dot"}[name]
    assert (folder / "README.md").read_text(encoding="utf-8") == CARD
    assert list(folder.rglob("*.safetensors")) and not list(folder.rglob("*.bin"))
    assert "offsphere" not in (folder / "modules.json").read_text(encoding="utf-8")
    assert declared_similarity(open_encoder(folder, device="cpu")).gammas[1] == FIXED[name][1]


@pytest.mark.parametrize("similarity", [Similarity(0.3, 0.8, learned=True), Similarity(0.2, 0.9)], ids=str)
def test_gammas_without_a_name_travel_in_the_model(encoder, collection, tmp_path, similarity):
    embedded = embed(encoder, collection)
    encoder.append(LearnedSimilarity(similarity, scale=5.0))
    save_encoder(encoder, tmp_path / "model", similarity, CARD)
    for model in (
        open_encoder(tmp_path / "model", device="cpu"),
        SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True),
    ):
        assert model.similarity_fn_name == "dot"
        declared = declared_similarity(model)
        assert declared.gammas == pytest.approx(similarity.gammas) and declared.name == similarity.name
        queries = model.encode_query([*collection.queries.values()])
        documents = model.encode_document([*collection.documents.values()])
        scores = model.similarity(queries, documents).numpy()
        np.testing.assert_allclose(
            scores, similarity.scores(embedded.queries, embedded.documents), rtol=1e-4, atol=1e-4
        )
        assert (-scores).argsort(1, kind="stable").tolist() == our_order(model, collection, declared)


@pytest.mark.parametrize("similarity", [Similarity.parse("learnable"), Similarity(0.2, 0.9)], ids=str)
def test_gammas_that_nothing_would_carry_are_refused(static, tmp_path, similarity):
    with pytest.raises(EncoderError, match=r"add offsphere\.modules\.LearnedSimilarity"):
        save_encoder(static, tmp_path / "model", similarity, CARD)
    assert not any(tmp_path.iterdir())


def test_prompts_travel_with_the_model(encoder, tmp_path):
    encoder.prompts.update(PROMPTS)
    save_encoder(encoder, tmp_path / "model", Similarity.parse("dot"), CARD)
    assert SentenceTransformer(str(tmp_path / "model"), device="cpu").prompts == PROMPTS


def test_an_older_model_is_replaced_as_a_whole(encoder, collection, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "left over.txt").write_text("old", encoding="utf-8")
    save_encoder(encoder, folder, Similarity.parse("dot"), CARD)
    assert not (folder / "left over.txt").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_model_can_be_saved_over_itself(encoder, collection, tmp_path):
    dot = Similarity.parse("dot")
    save_encoder(encoder, tmp_path / "model", dot, CARD)
    model = open_encoder(tmp_path / "model", device="cpu")
    save_encoder(model, tmp_path / "model", dot, CARD)
    expected = our_order(encoder, collection, dot)
    assert our_order(model, collection, dot) == expected
    assert our_order(open_encoder(tmp_path / "model", device="cpu"), collection, dot) == expected


def test_a_failure_leaves_the_older_model(static, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    save_encoder(static, folder, Similarity.parse("dot"), CARD)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    def fail(path: str, **kwargs) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(static, "save_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        save_encoder(static, folder, Similarity.parse("cosine"), "another card")
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
