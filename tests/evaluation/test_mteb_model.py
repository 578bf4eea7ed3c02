"""mteb on a local task: the same nDCG as ours, with the wrapper and with a saved model as it is."""

from __future__ import annotations

from statistics import fmean

import pytest
from scipy import stats

from offsphere.data import load_collection
from offsphere.encoders import declared_similarity, encode, save_encoder, strip_normalize
from offsphere.evaluation import per_query, rank
from offsphere.evaluation.embedding import embed
from offsphere.evaluation.mteb_model import MtebModel
from offsphere.modules import LearnedSimilarity
from offsphere.similarity import FIXED, Similarity

mteb = pytest.importorskip("mteb")
from datasets import Dataset  # noqa: E402
from mteb.abstasks import AbsTaskRetrieval, AbsTaskSTS  # noqa: E402
from mteb.abstasks.task_metadata import TaskMetadata  # noqa: E402

PROMPTS = {"query": "query: ", "document": "passage: "}
LEARNED = Similarity(0.9, 0.2, learned=True)


def metadata(name: str, kind: str, score: str) -> TaskMetadata:
    return TaskMetadata(
        name=name,
        dataset={"path": "local/local", "revision": "1"},
        description="made here",
        reference=None,
        type=kind,
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=score,
        date=None,
        domains=None,
        task_subtypes=None,
        license=None,
        annotations_creators=None,
        dialect=None,
        sample_creation=None,
        bibtex_citation="",
    )


class LocalRetrieval(AbsTaskRetrieval):
    """A collection of ours as a task of mteb."""

    metadata = metadata("LocalRetrieval", "Retrieval", "ndcg_at_10")
    collection = None

    def load_data(self, **settings) -> None:
        def rows(texts):
            return Dataset.from_list([{"id": identifier, "text": text} for identifier, text in texts.items()])

        queries, documents = rows(self.collection.queries), rows(self.collection.documents)
        judged = {query: dict(grades) for query, grades in self.collection.qrels.items()}
        split = {"corpus": documents, "queries": queries, "relevant_docs": judged, "top_ranked": None}
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


class LocalSTS(AbsTaskSTS):
    metadata = metadata("LocalSTS", "STS", "spearman")
    rows = None

    def load_data(self, **settings) -> None:
        self.dataset = {"test": Dataset.from_list(self.rows)}
        self.data_loaded = True


def theirs(model, task) -> float:
    found = mteb.evaluate(
        model, [task], cache=None, co2_tracker=False, show_progress_bar=False, raise_error=True,
        encode_kwargs={"show_progress_bar": False, "batch_size": 8},
    )  # fmt: skip
    return found.task_results[0].get_score()


@pytest.fixture
def collection(make):
    return load_collection(make("one"))


@pytest.fixture
def task(collection):
    task = LocalRetrieval()
    task.collection = collection
    return task


def ours(model, collection, similarity) -> float:
    strip_normalize(model)
    return fmean(per_query(rank(embed(model, collection), similarity).run(), collection.qrels)["nDCG@10"].values())


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize(
    ("kind", "name"), [*(("static", name) for name in (*FIXED, "learnable")), ("transformer", "qnorm")]
)
def test_the_wrapper_gives_our_ndcg_under_every_similarity(request, save, collection, task, kind, name):
    encoder = request.getfixturevalue(kind)
    encoder.prompts.update(PROMPTS)
    similarity = LEARNED if name == "learnable" else Similarity.parse(name)
    if similarity.learned:
        encoder.append(LearnedSimilarity(similarity))
        similarity = encoder[-1].similarity.detached()
    expected = ours(encoder, collection, similarity)
    asked = "own" if similarity.learned else name
    model = MtebModel(str(save(encoder)), asked)
    assert theirs(model, task) == pytest.approx(expected, abs=1e-5)  # mteb rounds to five digits
    assert name in model.mteb_model_meta.name


@pytest.mark.parametrize("name", ["dot", "dnorm", "learnable"])
def test_a_saved_model_runs_in_mteb_unchanged(static, tmp_path, collection, task, name):
    from sentence_transformers import SentenceTransformer

    static.prompts.update(PROMPTS)
    similarity = LEARNED if name == "learnable" else Similarity.parse(name)
    if similarity.learned:
        static.append(LearnedSimilarity(similarity))
        similarity = static[-1].similarity.detached()
    expected = ours(static, collection, similarity)
    save_encoder(static, tmp_path / "model", similarity, "# made here\n")
    opened = SentenceTransformer(str(tmp_path / "model"), trust_remote_code=True)
    assert theirs(opened, task) == pytest.approx(expected, abs=1e-5)
    assert theirs(MtebModel(str(tmp_path / "model")), task) == pytest.approx(expected, abs=1e-5)
    # Not vacuous: another similarity gives another number.
    other = MtebModel(str(tmp_path / "model"), "cosine" if name == "dot" else "dot")
    assert declared_similarity(opened) is not None and abs(theirs(other, task) - expected) > 1e-3


def test_sentence_pairs(static, save, sentences):
    """Inputs that are alike get no prompt; the first is the query."""
    first, second = sentences(20, 3), sentences(20, 4)
    scores = [float(i % 6) for i in range(20)]
    static.prompts.update(PROMPTS)
    task = LocalSTS()
    columns = zip(first, second, scores, strict=True)
    task.rows = [{"sentence1": a, "sentence2": b, "score": score} for a, b, score in columns]
    embeddings = [encode(static, part, "query", prompt="").astype(float) for part in (first, second)]
    expected = stats.spearmanr(Similarity.parse("qnorm").pairwise(*embeddings), scores).statistic
    assert theirs(MtebModel(str(save(static)), "qnorm"), task) == pytest.approx(expected, abs=1e-5)
