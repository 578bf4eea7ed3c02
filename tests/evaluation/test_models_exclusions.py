"""Documents that are never ranked for a query: what that does to values, and that it is said."""

from __future__ import annotations

import json

import numpy as np
import pytest

from offsphere.evaluation import read_trec
from offsphere.evaluation.compare_runs import compare_runs


def test_the_self_match_is_left_out_where_declared_and_refilled(static, save, make, evaluated, listener):
    """T-H1 and T-H2: 60 documents, of which a query gets 59 others; equal ids mean nothing elsewhere (T-H3)."""
    runs = {}
    for name, settings in (("declared", "exclude_self: true\n"), ("plain", "")):
        folder, told = make(name, settings=settings), listener()
        for file in ("queries.jsonl", "qrels/test.tsv"):
            text = (folder / file).read_text(encoding="utf-8")
            (folder / file).write_text(text.replace('"q', '"d').replace("\nq", "\nd"), encoding="utf-8")
        evaluated(str(save(static)), [str(folder)], out=folder / "out", progress=told)
        runs[name] = read_trec(folder / "out" / "runs" / f"cosine-{name}.trec")
        assert ("declared: never ranked: a document with the id of the query" in told.lines) == (name == "declared")
        described = json.loads((folder / "out" / "environment.json").read_text(encoding="utf-8"))
        assert described["datasets"][name]["exclude_self"] == (name == "declared")
    assert {len(found) for found in runs["declared"].values()} == {59}
    assert all(query not in found for query, found in runs["declared"].items())
    assert {len(found) for found in runs["plain"].values()} == {60}


def test_golden_value_of_the_self_match_rule(static, save, tmp_path, evaluated, values):
    """T-H1 and row 82: with the rule the relevant document is first; without it each query finds itself first."""
    words = "iron rust water moon sea tide salt bee dance honey sun light leaf green ice cold".split()
    table, vocabulary = static[0].embedding.weight.data, static.tokenizer.get_vocab()
    table[:] = 0
    for i, word in enumerate(words):  # two and two are near each other, and at right angles to all others
        table[vocabulary[word], i // 2 * 2] = 1.0 if i % 2 == 0 else 0.9
        table[vocabulary[word], i] += 0.5 * (i % 2)
    source, names = str(save(static)), ["cosine", "dot"]
    texts = "".join(json.dumps({"_id": str(i), "text": word}) + "\n" for i, word in enumerate(words))
    qrels = "".join(f"{i}\t{i + 1 - i % 2 * 2}\t1\n" for i in range(len(words)))
    folders = {}
    for kind, settings, expected in (("ruled", "exclude_self: true\n", 1.0), ("plain", "", 1 / np.log2(3))):
        folder = folders[kind] = tmp_path / kind / "made"
        (folder / "qrels").mkdir(parents=True)
        (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels)
        for file, content in (("corpus.jsonl", texts), ("queries.jsonl", texts), ("collection.yaml", settings)):
            (folder / file).write_text(content)
        rows = evaluated(source, [str(folder)], names, measures=("nDCG@10",), out=folder.parent)
        assert values(rows) == {("made", name, "nDCG@10"): pytest.approx(expected, abs=1e-15) for name in names}
        compared = compare_runs([folder.parent], [str(folder)])
        assert compared.means["made"] == dict.fromkeys(names, pytest.approx(expected, abs=1e-15))
        assert [score.excluded for score in compared.scores] == [0, 0]
    later = compare_runs([folders["plain"].parent], [str(folders["ruled"])])
    assert later.means["made"] == dict.fromkeys(names, 1.0)
    assert [score.excluded for score in later.scores] == [16, 16]


def test_exclusions_of_single_queries_are_said_and_kept(static, save, make, evaluated, listener):
    """T-H4, and row 85: the results say what was excluded."""
    folder, told = make("one", settings="excluded: {q0: [d1, d2], q3: [d4]}\n"), listener()
    evaluated(str(save(static)), [str(folder)], out=folder / "out", progress=told)
    assert "one: never ranked: 3 documents that it excludes for single queries" in told.lines
    run = read_trec(folder / "out" / "runs" / "cosine-one.trec")
    assert not run["q0"].keys() & {"d1", "d2"} and len(run["q0"]) == 58 and len(run["q1"]) == 60
    assert json.loads((folder / "out" / "environment.json").read_text())["datasets"]["one"]["excluded"] == 3
