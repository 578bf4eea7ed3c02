from __future__ import annotations

import json

import pytest

from offsphere.evaluation import read_results
from offsphere.evaluation.models import evaluate_models


def test_finished_data_sets_are_kept(static, save, make, tmp_path, encoded, evaluated, listener):
    source, out = str(save(static)), tmp_path / "out"
    one, two, three = (str(make(name, seed)) for seed, name in enumerate(("one", "two", "three")))
    first = evaluated(source, [one, two], ["cosine", "dot"], out=out)
    told = listener()
    again = evaluate_models([source], [one, two, three], ["cosine", "dot"], out=out, progress=told)
    assert encoded == ["one", "two", "three"]
    assert again.results[: len(first)] == first and "one: finished before, kept" in told.lines
    assert read_results(out / "results.csv") == again.results
    fresh = evaluate_models([source], [one, two, three], ["cosine", "dot"])
    assert fresh.results == again.results and fresh.comparisons == again.comparisons and fresh.points == again.points


def stop_at(tag):
    from offsphere.evaluation import write_trec

    def write(ranking, path, name):
        if name == tag:
            raise KeyboardInterrupt
        write_trec(ranking, path, name)

    return write


def test_what_was_interrupted_or_changed_is_done_again(static, save, make, tmp_path, encoded, monkeypatch, evaluated):
    source, out, one, two = str(save(static)), tmp_path / "out", make("one"), make("two", 1)
    with monkeypatch.context() as patch:  # ends between the run files and the end of the second data set
        patch.setattr("offsphere.evaluation.models.write_trec", stop_at("cosine-two"))
        with pytest.raises(KeyboardInterrupt):
            evaluated(source, [str(one), str(two)], ["cosine", "dot"], out=out)
    assert not (out / "results.csv").exists()
    expected = evaluated(source, [str(one), str(two)], ["cosine", "dot"], out=out)
    assert encoded == ["one", "two", "two"]
    run = out / "runs" / "dot-one.trec"
    run.write_text(run.read_text(encoding="utf-8") + "q0 Q0 d999 101 0.1 x\n", encoding="utf-8")
    assert evaluated(source, [str(one), str(two)], ["cosine", "dot"], out=out) == expected
    assert encoded[3:] == ["one"] and "d999" not in run.read_text(encoding="utf-8")
    with (one / "corpus.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"_id": "new", "text": "iron"}) + "\n")
    evaluated(source, [str(one), str(two)], ["cosine", "dot"], out=out)
    evaluated(source, [str(one), str(two)], ["cosine", "dot"], max_length=3, out=out)
    evaluated(source, [str(one), str(two)], ["cosine"], max_length=3, out=out)
    assert encoded[4:] == ["one", "one", "two", "one", "two"]
