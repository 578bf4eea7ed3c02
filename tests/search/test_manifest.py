from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from offsphere.data.documents import Document
from offsphere.diagnosis import subject
from offsphere.encoders import encode
from offsphere.errors import IndexFolderError, UsageError
from offsphere.modules import LearnedSimilarity
from offsphere.search.index import Index
from offsphere.search.manifest import read_manifest
from offsphere.similarity import Similarity


class TestManifest:
    def test_learned_gammas_are_those_of_the_model(self, tmp_path, static, save, documents):
        learned = Similarity(0.9, 0.1, learned=True)
        static.append(LearnedSimilarity(learned))
        index = Index.create(tmp_path / "index", save(static))
        index.add(documents)
        gammas = index.similarity.gammas
        assert index.similarity.name == "learnable" and gammas != (0.5, 0.5)
        assert read_manifest(index.folder).similarity == index.similarity
        np.testing.assert_array_equal(
            index.embeddings, encode(static, [d.passage for d in index.documents(index.ids)], "document")
        )
        opened = Index.open(index.folder)
        for name in (None, "learnable", "own", Similarity(*gammas)):
            assert opened.search("bee moon", 30, name) == index.search("bee moon", 30)
        assert "ranked under dot, not learnable as the index is meant" in opened.explain("dot")

    def test_a_model_that_declares_nothing_needs_a_similarity(self, tmp_path, static, monkeypatch):
        """T-A2. sentence-transformers stores cosine when it saves such a model, so this one is not saved."""
        monkeypatch.setattr(subject, "open_encoder", lambda *arguments, **more: static)
        with pytest.raises(UsageError, match="does not say which similarity"):
            Index.create(tmp_path / "index", "mine")
        assert not (tmp_path / "index").exists()
        assert Index.create(tmp_path / "index", "mine", similarity="dot").similarity.name == "dot"

    @pytest.mark.parametrize("name", ["multi-qa-mpnet-base-dot-v1", "all-cosine-normalized"])
    def test_the_name_of_a_model_says_nothing(self, tmp_path, static, save, name):
        """T-A7. What it ranks under is stored in it, or asked for; nobody reads it out of its name."""
        folder = save(static, name)
        settings = folder / "config_sentence_transformers.json"
        stored = json.loads(settings.read_text(encoding="utf-8"))
        settings.write_text(json.dumps(stored | {"similarity_fn_name": None}), encoding="utf-8")
        with pytest.raises(UsageError, match="does not say which similarity"):
            Index.create(tmp_path / "index", folder)
        other = "cosine" if "dot" in name else "dot"
        settings.write_text(json.dumps(stored | {"similarity_fn_name": other}), encoding="utf-8")
        assert Index.create(tmp_path / "index", folder).similarity.name == other

    def test_what_it_says(self, tmp_path, model, static):
        index = Index.create(tmp_path / "index", model, similarity="qnorm", prompts={"query": "query : "}, max_length=5)
        index.add([Document("a", "", "bee")])
        stored = json.loads((tmp_path / "index" / "manifest.json").read_text(encoding="utf-8"))
        assert len(stored.pop("fingerprint")) == 32
        assert stored == {
            "format": 1,
            "model": model,
            "similarity": {"gamma_q": 1.0, "gamma_d": 0.0},
            "prompts": {"query": "query : ", "document": ""},
            "max_length": 5,
            "dimension": 16,
            "fields": {},
            "approximate": None,
        }
        assert (index.similarity.name, index.stamp.similarity.name, index.stamp.prompt) == ("qnorm", "qnorm", "")

    def test_the_model_is_found_from_any_folder(self, tmp_path, model, monkeypatch):
        monkeypatch.chdir(Path(model).parent)
        index = Index.create("index", Path(model).name, similarity="dot")
        index.add([Document("a", "", "bee")])
        monkeypatch.chdir("/")
        assert Index.open(tmp_path / "index").search("bee")[0].id == "a"

    def test_prompts_are_applied_each_on_its_side(self, tmp_path, model):
        plain = Index.create(tmp_path / "plain", model, similarity="dot")
        prompted = Index.create(
            tmp_path / "prompted", model, similarity="dot", prompts={"query": "query : ", "document": "passage : "}
        )
        for index in (plain, prompted):
            index.add([Document("a", "", "bee")])
        raw = {name: encode(plain.encoder, [name], "query", prompt="")[0] for name in ("passage : bee", "query : bee")}
        np.testing.assert_array_equal(prompted.embeddings[0], raw["passage : bee"])
        assert (plain.embeddings[0] != prompted.embeddings[0]).any()
        (hit,) = Index.open(tmp_path / "prompted").search("bee")
        assert hit.score == pytest.approx(float(raw["query : bee"] @ raw["passage : bee"]), rel=1e-5)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"similarity": "cosine"}, r"its similarity is 'dot', not 'cosine'|its similarity is dot, not cosine"),
            (
                {"prompts": {"document": "passage : "}},
                r"its document prompt is '', not 'passage : ' \(keep it with --doc",
            ),
            ({"max_length": 5}, r"cut at the limit of the model, not at 5 \(leave out --max-length"),
        ],
    )
    def test_adding_in_another_way_is_refused(self, index, model, changed, message):
        with pytest.raises(IndexFolderError, match=message):
            Index.create(index.folder, model, **changed)
        assert Index.create(index.folder, model).similarity == index.similarity  # what is left out stays as it is
        assert Index.create(index.folder, model, similarity="dot", prompts={"query": ""}).count() == 30

    def test_another_model_is_refused(self, index, tmp_path, static, save):
        import torch

        with torch.no_grad():
            static[0].embedding.weight[0, 0] += 1
        other = save(static, "other")
        for attempt in (lambda: Index.open(index.folder, other), lambda: Index.create(index.folder, other)):
            with pytest.raises(IndexFolderError, match=r"was made with .* another model .*\n.*--out ANOTHER_FOLDER"):
                attempt()
        Path(index.manifest.model).rename(tmp_path / "moved")
        assert Index.open(index.folder, tmp_path / "moved").search("bee", 3) == index.search("bee", 3)
        (tmp_path / "other").rename(index.manifest.model)  # the folder that the manifest names has other weights now
        with pytest.raises(IndexFolderError, match="another model"):
            Index.open(index.folder).search("bee")

    def test_what_is_no_index_says_what_to_do(self, index, tmp_path, model):
        with pytest.raises(IndexFolderError, match="nowhere is not a folder; make an index with: offsphere index"):
            Index.open(tmp_path / "nowhere")
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "precious.txt").write_text("kept", encoding="utf-8")
        for attempt in (Index.open, lambda folder: Index.create(folder, model, similarity="dot")):
            with pytest.raises(IndexFolderError, match=r"has no manifest.json, so it is no index"):
                attempt(tmp_path / "other")
        manifest = index.folder / "manifest.json"
        stored = manifest.read_text(encoding="utf-8")
        for text, message in (
            (stored.replace('"format": 1', '"format": 2'), "has format 2, and this version"),
            (stored[:50], "is damaged"),
            ("[]", "is damaged"),
            (stored.replace("dimension", "dimensions"), "is damaged"),
            (stored.replace('"dimension": 16', '"dimension": 17'), "have 16 dimensions, but its manifest says 17"),
        ):
            manifest.write_text(text, encoding="utf-8")
            with pytest.raises(IndexFolderError, match=message):
                Index.open(index.folder, model).add([Document("x", "", "bee")])
        manifest.unlink()
        for attempt in (Index.open, lambda folder: Index.create(folder, model, similarity="dot")):
            with pytest.raises(IndexFolderError, match=r"has documents\.lance but no manifest\.json"):
                attempt(index.folder)

    def test_object_storage_is_no_folder(self, tmp_path, model, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(IndexFolderError, match=r"a folder on this machine, found s3:/.*--to lancedb:s3://"):
            Index.create("s3://bucket/index", model, similarity="dot")
        assert not list(tmp_path.glob("s3*"))

    def test_folders_with_awkward_names(self, tmp_path, model):
        folder = tmp_path / "größe %20 #1 ?x=1 'q'"
        Index.create(folder, model, similarity="dot").add([Document("a", "", "bee")])
        assert Index.open(folder).search("bee")[0].id == "a"
        assert sorted(one.name for one in tmp_path.iterdir()) == ["encoder", folder.name]
