"""``index`` and ``search`` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from offsphere import cli
from offsphere.cli import index as commands
from offsphere.errors import IndexFolderError, OffsphereError, UsageError
from offsphere.evaluation.models import evaluate_models

ROOT = Path(__file__).parents[2]
XQUAD = ROOT / "datasets" / "xquad_en"
QUESTION = "How many points did the Panthers defense surrender?"


@pytest.fixture
def offsphere(monkeypatch, capsys):
    """Runs the program in this process; gives what it printed, and raises what it would turn into an exit code."""
    monkeypatch.setattr(commands, "quiet_libraries", lambda: None)

    def run(*arguments: object) -> str:
        capsys.readouterr()
        try:
            cli.app(cli.spread_lists([str(argument) for argument in arguments]), standalone_mode=False)
        except OffsphereError as error:
            raise type(error)(f"{error}") from error
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """An index of xquad_en, made by the program in a process of its own."""
    folder = tmp_path_factory.mktemp("made") / "index"
    done = subprocess.run(
        [sys.executable, "-m", "offsphere", "index", "package:wordllama", str(XQUAD), "--out", str(folder), "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["new"] == 240
    assert "240 new documents and 0 changed ones to encode" in done.stderr
    assert "ranked under cosine, no prompts" in done.stderr
    return folder


def test_search_prints_hits_with_length_and_angle(offsphere, made):
    (answer,) = json.loads(offsphere("search", made, QUESTION, "-k", 3, "--json"))
    assert (answer["query"], answer["similarity"]) == (QUESTION, "cosine")
    assert len(answer["hits"]) == 3
    assert list(answer["hits"][0]) == ["id", "score", "title", "text", "metadata", "norm", "cosine"]
    assert answer["hits"][0]["score"] == pytest.approx(answer["hits"][0]["cosine"], abs=1e-6)
    table = " ".join(offsphere("search", made, QUESTION, "-k", 3).split())
    for hit in answer["hits"]:
        assert f"{hit['score']:.4f}" in table and f"{hit['norm']:.4f}" in table and hit["id"] in table


def test_flags_before_the_question_take_one_value(offsphere, made):
    before = json.loads(offsphere("search", made, "--similarity", "dot", "-k", 2, "--json", QUESTION, "Normans"))
    after = json.loads(offsphere("search", made, QUESTION, "Normans", "--similarity", "dot", "-k", 2, "--json"))
    assert before == after
    assert {answer["similarity"] for answer in before} == {"dot"}
    assert [answer["query"] for answer in before] == [QUESTION, "Normans"]
    assert before != json.loads(offsphere("search", made, QUESTION, "Normans", "-k", 2, "--json"))


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_the_run_file_is_the_one_that_evaluate_writes(offsphere, made, tmp_path, similarity):
    offsphere("search", made, "--data", XQUAD, "--run", tmp_path / "new" / "a.trec", "--similarity", similarity)
    evaluate_models(["package:wordllama"], [str(XQUAD)], [similarity], measures=("nDCG@10",), out=tmp_path / "out")
    expected = (tmp_path / "out" / "runs" / f"{similarity}-xquad_en.trec").read_bytes()
    assert (tmp_path / "new" / "a.trec").read_bytes() == expected


def test_adding_changing_and_deleting(offsphere, tmp_path):
    def write(*rows: dict) -> Path:
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    def index(*arguments: object) -> dict:
        return json.loads(offsphere("index", "package:wordllama", *arguments, "--out", tmp_path / "index", "--json"))

    first, second = {"id": "a", "text": "bees make honey", "lang": "en"}, {"id": "b/💡", "text": "Eisen rostet"}
    assert (index(write(first, second))["new"], index(tmp_path / "a.jsonl")["unchanged"]) == (2, 2)
    second["lang"] = "de"
    done = index(write(first, second, {"id": "c", "text": ""}))
    assert {name: done[name] for name in ("new", "changed", "unchanged", "empty", "documents")} == {
        "new": 1, "changed": 1, "unchanged": 1, "empty": 1, "documents": 3,
    }  # fmt: skip
    (answer,) = json.loads(offsphere("search", tmp_path / "index", "honey", "--filter", "lang = 'de'", "--json"))
    assert [hit["id"] for hit in answer["hits"]] == ["b/💡"]
    assert index("--delete", "b/💡", "c", "nowhere")["deleted"] == 2
    assert index(write(first, {"id": "z", "text": "x"}), "--delete", "a")["documents"] == 2  # deleted, then new again
    assert index(write({"id": "z", "text": "x"}), "--delete-missing")["documents"] == 1


def test_prompts_of_a_collection_are_kept_unless_flags_give_others(offsphere, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "corpus.jsonl").write_text('{"_id": "a", "text": "bee"}\n', encoding="utf-8")
    (tmp_path / "one" / "collection.yaml").write_text("prompts: {query: 'q: ', document: 'd: '}", encoding="utf-8")
    offsphere("index", "package:wordllama", tmp_path / "one", "--out", tmp_path / "index")
    stored = json.loads((tmp_path / "index" / "manifest.json").read_text(encoding="utf-8"))
    assert stored["prompts"] == {"query": "q: ", "document": "d: "}
    with pytest.raises(IndexFolderError, match=r"its query prompt is 'q: ', not 'ask: ' \(keep it with --query-prompt"):
        offsphere(
            "index", "package:wordllama", tmp_path / "one", "--out", tmp_path / "index", "--query-prompt", "ask: "
        )
    offsphere("index", "package:wordllama", tmp_path / "one", "--out", tmp_path / "other", "--query-prompt", "ask: ")
    stored = json.loads((tmp_path / "other" / "manifest.json").read_text(encoding="utf-8"))
    assert stored["prompts"] == {"query": "ask: ", "document": "d: "}


def test_approximate_says_what_it_measured(offsphere, tmp_path):
    arguments = ("index", "package:wordllama", XQUAD, "--out", tmp_path / "index", "--approximate", "--json")
    done = json.loads(offsphere(*arguments))
    assert "recall@10" in done["search"] or done["search"].startswith("exact search stays")
    (answer,) = json.loads(offsphere("search", tmp_path / "index", QUESTION, "--json"))
    assert len(answer["hits"]) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("INDEX",), "give a question in quotes, or --data COLLECTION --run FILE.trec"),
        (("INDEX", "bee", "--data", "x", "--run", "y"), "give a question in quotes, or"),
        (("INDEX", "--data", "x"), "--data and --run belong together"),
        (("INDEX", "--data", "x", "--run", "y", "--filter", "id = 'a'"), "leave out --filter"),
    ],
)
def test_requests_that_contradict_themselves(offsphere, arguments, message):
    with pytest.raises(UsageError, match=message):
        offsphere("search", *arguments)


def test_nothing_to_index(offsphere, tmp_path):
    with pytest.raises(UsageError, match="nothing to do; name a collection"):
        offsphere("index", "package:wordllama", "--out", tmp_path / "index")
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("command", ["index", "search"])
def test_help_shows_an_example(offsphere, command):
    assert f"Example: offsphere {command}" in " ".join(offsphere(command, "--help").split())
