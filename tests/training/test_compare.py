"""The comparison as a whole, on encoders that train in a moment."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize
from transformers import BertConfig, PreTrainedConfig

from offsphere.config import CompareConfig
from offsphere.data import load_collection, load_pairs
from offsphere.encoders import declared_similarity, encode, open_encoder, randomise
from offsphere.errors import EncoderError
from offsphere.evaluation import MEASURES, Result, compare_similarities, read_query_values, read_results, read_trec
from offsphere.losses import auto_scale
from offsphere.similarity import FIXED, LEARNABLE, NAMES, Similarity, norms
from offsphere.training.compare import compare
from offsphere.training.run_folder import RunFolder

Settings = Callable[..., CompareConfig]
Content = Callable[[Path], dict[str, tuple[int, bytes]]]


def recompute(folder: Path, data: Path, similarity: Similarity) -> dict[str, float]:
    """Open the model, encode, score all pairs in plain NumPy, and measure; each query has one relevant document."""
    model = open_encoder(folder, device="cpu")
    collection = load_collection(data)
    queries = encode(model, [*collection.queries.values()], "query").astype(np.float64)
    documents = encode(model, [*collection.documents.values()], "document").astype(np.float64)
    lengths = np.sqrt((documents**2).sum(1))
    scores = queries @ documents.T / lengths ** similarity.gammas[1]
    relevant = [list(collection.documents).index(*collection.qrels[query]) for query in collection.queries]
    ranks = [1 + int((row > row[place]).sum()) for row, place in zip(scores, relevant, strict=True)]
    return {
        "nDCG@10": fmean(1 / math.log2(rank + 1) if rank <= 10 else 0.0 for rank in ranks),
        "R@100": fmean(float(rank <= 100) for rank in ranks),
        "RR@10": fmean(1 / rank if rank <= 10 else 0.0 for rank in ranks),
    }


def values_of(rows: list[Result], **wanted: object) -> dict[str, float]:
    return {
        row.measure: row.value for row in rows if all(getattr(row, name) == value for name, value in wanted.items())
    }


class TestResults:
    def test_every_model_is_scored_under_every_similarity_on_everything(
        self, finished_run: Path, static_encoder: Path
    ) -> None:
        rows = read_results(finished_run / "results.csv")
        found = [(row.similarity, row.seed, row.scored_as, row.dataset, row.measure) for row in rows]
        trained = product(NAMES, (0, 1), NAMES, ("home", "away"), MEASURES)
        untrained = product(("pretrained",), (None,), FIXED, ("home", "away"), MEASURES)
        assert len(found) == len(set(found))
        assert set(found) == {*trained, *untrained}
        assert {(row.model, row.split, row.n_queries) for row in rows} == {(str(static_encoder), "test", 24)}
        assert {row.training_data for row in rows if row.seed is not None} == {"home"}

    def test_cosine_ranks_as_dnorm_and_dot_as_qnorm_for_every_model(self, finished_run: Path) -> None:
        rows = read_results(finished_run / "results.csv")
        scored = {name: [row.value for row in rows if row.scored_as == name] for name in FIXED}
        assert scored["cosine"] == scored["dnorm"]
        assert scored["dot"] == scored["qnorm"]
        assert scored["cosine"] != scored["dot"]

    def test_numbers_come_back_from_the_saved_models(self, finished_run: Path, home: Path, away: Path) -> None:
        rows = read_results(finished_run / "results.csv")
        models = sorted(finished_run.glob("variants/*/model"))
        assert len(models) == 5
        for model in models:
            trained_as, seed = model.parent.name.split("-seed")
            own = declared_similarity(open_encoder(model))
            for name, data in product(NAMES, (home, away)):
                similarity = own if name == trained_as == LEARNABLE else learned(finished_run, int(seed), name)
                wanted = {"similarity": trained_as, "seed": int(seed), "scored_as": name, "dataset": data.name}
                assert values_of(rows, **wanted) == pytest.approx(recompute(model, data, similarity), abs=1e-9)

    def test_the_untrained_encoder_is_the_reference(self, finished_run: Path, static_encoder: Path, away: Path) -> None:
        rows = read_results(finished_run / "results.csv")
        for name in FIXED:
            found = values_of(rows, similarity="pretrained", scored_as=name, dataset="away")
            assert found == pytest.approx(recompute(static_encoder, away, Similarity.parse(name)), abs=1e-9)

    def test_rows_carry_the_gammas_of_their_model(self, finished_run: Path) -> None:
        run = RunFolder(finished_run)
        for row in read_results(finished_run / "results.csv"):
            if row.seed is not None:
                stored = run.find(f"{row.similarity}-seed{row.seed}").similarity
                assert (row.gamma_q, row.gamma_d) == stored.gammas
                assert stored.learned == (row.similarity == LEARNABLE)

    def test_values_per_query_average_to_the_results(self, finished_run: Path) -> None:
        rows = read_results(finished_run / "results.csv")
        per_query: dict[tuple[object, ...], list[float]] = {}
        for value in read_query_values(finished_run / "per_query.parquet"):
            key = (value.similarity, value.seed, value.dataset, value.measure)
            per_query.setdefault(key, []).append(value.value)
        own = {
            (row.similarity, row.seed, row.dataset, row.measure): row.value
            for row in rows
            if row.scored_as == (row.similarity if row.seed is not None else "cosine")
        }
        assert own == {key: pytest.approx(fmean(values)) for key, values in per_query.items()}

    def test_training_made_the_models_differ(self, finished_run: Path) -> None:
        rows = read_results(finished_run / "results.csv")
        by_model = {}
        for row in rows:
            if row.scored_as == "dot" and row.measure != "R@100":
                by_model.setdefault((row.similarity, row.seed), []).append(row.value)
        assert len(set(map(tuple, by_model.values()))) == 11


def learned(run: Path, seed: int, name: str) -> Similarity:
    """The similarity by this name; for learnable, what the training with this seed learned."""
    return Similarity.parse(name) if name != LEARNABLE else RunFolder(run).find(f"{LEARNABLE}-seed{seed}").similarity


class TestFolder:
    def test_it_has_every_part(self, finished_run: Path) -> None:
        parts = {path.name for path in finished_run.iterdir()}
        assert parts == {
            *("config.yaml", "environment.json", "results.csv", "per_query.parquet", "norms.json", "log.jsonl"),
            *("comparison.json", "runs", "model", "variants"),
        }
        assert not [path for path in finished_run.rglob(".*")], "no temporary files"

    def test_settings_are_resolved(self, finished_run: Path, settings: Settings) -> None:
        stored = yaml.safe_load((finished_run / "config.yaml").read_text(encoding="utf-8"))
        assert stored["similarities"] == list(NAMES)
        assert (stored["steps"], stored["batch_size"], stored["learning_rate"]) == (6, 12, 0.1)
        asked = settings(finished_run).model_dump(mode="json", exclude={"out"})
        assert {name: stored[name] for name in asked} == asked | {"processes": 1, "alpha": 20.0}

    def test_the_log_has_every_training(self, finished_run: Path) -> None:
        lines = [json.loads(line) for line in (finished_run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        validations = [(line["similarity"], line["seed"], line["step"]) for line in lines if line["event"] != "train"]
        assert sorted(validations) == sorted(product(NAMES, (0, 1), (0, 2, 4, 6)))
        for finished in RunFolder(finished_run).finished():
            if finished.seed is not None:
                (best,) = [
                    line
                    for line in lines
                    if (line["similarity"], line["seed"], line["step"], line["event"])
                    == (finished.trained_as, finished.seed, finished.best_step, "validation")
                ]
                assert best["nDCG@10"] == finished.validation

    def test_run_files_of_the_first_seed_give_its_results(self, finished_run: Path, home: Path, away: Path) -> None:
        rows = read_results(finished_run / "results.csv")
        names = {path.name for path in (finished_run / "runs").iterdir()}
        assert names == {f"{name}-seed0-{data}.trec" for name in NAMES for data in ("home", "away")}
        for name, data in product(NAMES, (home, away)):
            run = read_trec(finished_run / "runs" / f"{name}-seed0-{data.name}.trec")
            reciprocal = []
            for query, judged in load_collection(data).qrels.items():
                ranked = sorted(run[query], key=run[query].__getitem__, reverse=True)[:10]
                places = [ranked.index(document) for document in judged if document in ranked]
                reciprocal.append(1 / (min(places) + 1) if places else 0.0)
            found = values_of(rows, similarity=name, seed=0, scored_as=name, dataset=data.name)
            assert found["RR@10"] == pytest.approx(fmean(reciprocal))

    def test_lengths_of_every_model_are_recorded(self, finished_run: Path) -> None:
        records = json.loads((finished_run / "norms.json").read_text(encoding="utf-8"))
        found = {(record["similarity"], record["seed"], record["dataset"]) for record in records}
        assert found == {*product(NAMES, (0, 1), ("home", "away")), *product(["pretrained"], [None], ("home", "away"))}

    def test_the_verdict_follows_from_the_values(self, finished_run: Path, static_encoder: Path) -> None:
        stored = json.loads((finished_run / "comparison.json").read_text(encoding="utf-8"))
        values = read_query_values(finished_run / "per_query.parquet")
        expected = compare_similarities(str(static_encoder), values, ["home"])
        assert stored == json.loads(json.dumps(expected.to_dict()))
        assert (stored["in_domain"], stored["out_of_domain"]) == (["home"], ["away"])


class TestModels:
    def test_of_each_similarity_the_best_seed_is_kept(self, finished_run: Path) -> None:
        run = RunFolder(finished_run)
        kept = {path.parent.name for path in finished_run.glob("variants/*/model")}
        for name in NAMES:
            seeds = [run.find(f"{name}-seed{seed}") for seed in (0, 1)]
            best = max(seeds, key=lambda one: one.validation)
            assert {one.name for one in seeds} & kept == {best.name}

    def test_the_recommended_one_is_in_model(self, finished_run: Path, content: Content) -> None:
        verdict = json.loads((finished_run / "comparison.json").read_text(encoding="utf-8"))["verdict"]["similarity"]
        (kept,) = finished_run.glob(f"variants/{verdict}-seed*/model")
        files = {name: data for name, (_, data) in content(kept).items()}
        assert {name: data for name, (_, data) in content(finished_run / "model").items()} == files
        assert "model.safetensors" in files

    def test_fixed_similarities_need_no_offsphere_and_are_named_by_how_they_rank(self, finished_run: Path) -> None:
        for model in finished_run.glob("variants/*/model"):
            name = model.parent.name.split("-")[0]
            needs = "offsphere" in (model / "modules.json").read_text(encoding="utf-8")
            assert needs == (name == LEARNABLE)
            stored = json.loads((model / "config_sentence_transformers.json").read_text(encoding="utf-8"))
            assert stored["similarity_fn_name"] == ("cosine" if name in ("cosine", "dnorm") else "dot")

    def test_the_card_shows_the_numbers_of_the_results(self, finished_run: Path) -> None:
        rows = read_results(finished_run / "results.csv")
        for model in finished_run.glob("variants/*/model"):
            name, seed = model.parent.name.split("-seed")
            card = (model / "README.md").read_text(encoding="utf-8")
            for data in ("home", "away"):
                own = values_of(rows, similarity=name, seed=int(seed), scored_as=name, dataset=data)
                shown = " | ".join(f"{100 * own[measure]:.1f}" for measure in MEASURES)
                assert f"| {data} | 24 | {shown} |" in card

    def test_the_code_on_the_card_runs(self, finished_run: Path) -> None:
        for model in finished_run.glob("variants/*/model"):
            card = (model / "README.md").read_text(encoding="utf-8")
            (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
            code = code.replace("path/to/this/folder", str(model)).replace("how long is a vector", "topic1word1")
            code = code.replace("The length of a vector is", "topic1word1 topic1word2")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(model), "exec"), {})
            assert "tensor([[" in printed.getvalue()
            assert "nan" not in printed.getvalue()


class TestProgress:
    def test_it_says_what_is_compared_and_counts_to_the_end(self, settings: Settings, tmp_path: Path) -> None:
        said: list[str] = []
        work: dict[str, tuple[int, list[int]]] = {}

        class Recorder:
            def say(self, text: str) -> None:
                said.append(text)

            def start(self, what: str, total: int) -> Callable[[int], None]:
                work[what] = (total, [])
                return work[what][1].append

        compare(settings(tmp_path / "run", seeds=[0], similarities=["cosine", "dot"], steps=2), Recorder())
        assert "training       48 pairs of" in "\n".join(said)
        assert "in domain      home: 24 queries, 96 documents" in said
        assert "out of domain  away: 24 queries, 24 documents" in said
        assert [line.split()[0] for line in said[-2:]] == ["cosine-seed0", "dot-seed0"]
        assert {"cosine-seed0 (1/2)", "dot-seed0 (2/2)", "evaluate pretrained", "tokenise"} <= work.keys()
        for what, (total, done) in work.items():
            assert done[-1] == total, what
            assert done == sorted(done)


class TestVariations:
    def test_a_learned_scale_leaves_a_model_that_needs_no_offsphere(
        self, settings: Settings, tmp_path: Path, away: Path
    ) -> None:
        out = tmp_path / "run"
        compare(settings(out, seeds=[0], similarities=["cosine", "qnorm"], learn_scale=True, gamma_learning_rate=0.3))
        for name in ("cosine", "qnorm"):
            model = out / "variants" / f"{name}-seed0" / "model"
            assert "offsphere" not in (model / "modules.json").read_text(encoding="utf-8")
            found = values_of(
                read_results(out / "results.csv"), similarity=name, scored_as=name, dataset="away", seed=0
            )
            assert found == pytest.approx(recompute(model, away, Similarity.parse(name)), abs=1e-9)
            lines = [json.loads(line) for line in (model.parent / "log.jsonl").read_text().splitlines()]
            finished = RunFolder(out).find(f"{name}-seed0")
            assert abs(finished.scale / lines[0]["scale"] - 1) > 0.01
            assert f"| scale (inverse temperature) | {finished.scale:.4g} |" in (model / "README.md").read_text()

    @pytest.mark.parametrize("learn_scale", [False, True])
    def test_exponents_of_the_user_s_own_are_trained_saved_and_scored(
        self, settings: Settings, tmp_path: Path, away: Path, learn_scale: bool
    ) -> None:
        out, name = tmp_path / "run", "gamma_q=0.2,gamma_d=0.9"
        compare(settings(out, seeds=[0], similarities=["cosine", name, "dot"], learn_scale=learn_scale))
        model = out / "variants" / f"{name}-seed0" / "model"
        assert declared_similarity(open_encoder(model)) == Similarity(0.2, 0.9)
        rows = read_results(out / "results.csv")
        for similarity in ("cosine", name, "dot"):
            found = values_of(rows, similarity=similarity, scored_as=name, dataset="away", seed=0)
            saved = out / "variants" / f"{similarity}-seed0" / "model"
            assert found == pytest.approx(recompute(saved, away, Similarity(0.2, 0.9)), abs=1e-9)

    def test_frozen_layers_stay_and_the_saved_model_gives_the_results(
        self, settings: Settings, tmp_path: Path, bert_encoder: Path, away: Path
    ) -> None:
        out = tmp_path / "run"
        prompts = {"query_prompt": "ask : ", "document_prompt": "answer : "}
        some = {"seeds": [0], "similarities": ["cosine", "dot"], "steps": 4, "learning_rate": 0.01}
        compare(settings(out, model=str(bert_encoder), freeze_layers=1, **some, **prompts))
        start = load_file(bert_encoder / "model.safetensors")
        for name in ("cosine", "dot"):
            model = out / "variants" / f"{name}-seed0" / "model"
            trained = load_file(model / "model.safetensors")
            moved = {key for key, value in trained.items() if not torch.equal(value, start[key])}
            assert moved
            assert all("layer.1." in key for key in moved)
            assert open_encoder(model).prompts["query"] == "ask : "
            found = values_of(
                read_results(out / "results.csv"), similarity=name, scored_as=name, dataset="away", seed=0
            )
            assert found == pytest.approx(recompute(model, away, Similarity.parse(name)), abs=1e-9)
        assert not list(out.glob("tmp*"))

    def test_random_weights_differ_by_seed_and_set_the_scale(
        self, settings: Settings, tmp_path: Path, static_encoder: Path, home: Path
    ) -> None:
        out = tmp_path / "run"
        compare(settings(out, similarities=["cosine", "dot"], init="random", learning_rate=1e-9))
        pairs = load_pairs(home)
        for seed in (0, 1):
            model = SentenceTransformer(str(static_encoder), device="cpu")
            randomise(model, seed)
            lengths = [norms(encode(model, texts, "query")) for texts in (pairs.queries, pairs.positives)]
            scale = RunFolder(out).find(f"dot-seed{seed}").scale
            assert scale == pytest.approx(auto_scale(Similarity.parse("dot"), *lengths), rel=1e-5)
        rows = read_results(out / "results.csv")
        assert {row.similarity for row in rows} == {"cosine", "dot"}
        by_seed = [values_of(rows, similarity="cosine", scored_as="cosine", dataset="away", seed=s) for s in (0, 1)]
        assert by_seed[0] != by_seed[1]

    def test_an_encoder_without_lengths_is_refused_before_training(
        self,
        settings: Settings,
        tmp_path: Path,
        write_encoder: Callable[[Path, PreTrainedConfig, str], Path],
        bert_config: Callable[..., BertConfig],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The first token of a BERT whose last LayerNorm is as it was made has the same length everywhere."""
        encoder = write_encoder(tmp_path, bert_config(), "cls")
        monkeypatch.setattr("offsphere.training.run.train_variant", pytest.fail)
        with pytest.raises(EncoderError, match=r"the same length.*\n.*cosine only"):
            compare(settings(tmp_path / "run", model=str(encoder)))
        assert not list((tmp_path / "run" / "variants").iterdir())

    def test_cosine_alone_can_still_be_trained_on_it(
        self,
        settings: Settings,
        tmp_path: Path,
        write_encoder: Callable[[Path, PreTrainedConfig, str], Path],
        bert_config: Callable[..., BertConfig],
    ) -> None:
        encoder = write_encoder(tmp_path, bert_config(), "cls")
        some = {"seeds": [0], "similarities": ["cosine"], "steps": 1}
        assert compare(settings(tmp_path / "run", model=str(encoder), **some)).verdict.similarity == "cosine"

    def test_a_normalize_module_is_named_and_taken_off(
        self, settings: Settings, tmp_path: Path, static_model: SentenceTransformer, away: Path
    ) -> None:
        static_model.append(Normalize())
        static_model.save(str(tmp_path / "unit"), create_model_card=False)
        said: list[str] = []

        class Recorder:
            def say(self, text: str) -> None:
                said.append(text)

            def start(self, what: str, total: int) -> Callable[[int], None]:
                return lambda done: None

        out, some = tmp_path / "run", {"seeds": [0], "similarities": ["cosine", "dot"], "steps": 2}
        compare(settings(out, model=str(tmp_path / "unit"), **some), Recorder())
        assert [line for line in said if "ends with a Normalize module" in line]
        model = out / "variants" / "dot-seed0" / "model"
        assert "Normalize" not in (model / "modules.json").read_text(encoding="utf-8")
        found = values_of(read_results(out / "results.csv"), similarity="dot", scored_as="dot", dataset="away", seed=0)
        assert found == pytest.approx(recompute(model, away, Similarity.parse("dot")), abs=1e-9)
