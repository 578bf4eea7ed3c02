"""``--shard`` and ``--shards`` from the command line."""

from __future__ import annotations

import json
import sys

import pytest

from offsphere import cli
from offsphere.cli import export as export_commands
from offsphere.cli import index as commands


@pytest.fixture
def offsphere(monkeypatch, capsys):
    """Runs a command in this process; gives its exit code, standard output and standard error."""
    for module in (commands, export_commands):
        monkeypatch.setattr(module, "quiet_libraries", lambda: None)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["offsphere", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
            sys.exit(0)
        written = capsys.readouterr()
        return int(end.value.code or 0), written.out, written.err

    return run


@pytest.fixture
def collection(tmp_path, sentences):
    folder = tmp_path / "collection"
    (folder / "qrels").mkdir(parents=True)
    for name, count, seed in (("corpus", 60, 0), ("queries", 5, 1)):
        rows = [json.dumps({"_id": f"{name}{i}", "text": text}) for i, text in enumerate(sentences(count, seed))]
        (folder / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    judged = "".join(f"queries{i}\tcorpus{i}\t1\n" for i in range(5))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged, encoding="utf-8")
    return folder


@pytest.fixture
def model(static, save):
    static.similarity_fn_name = "dot"
    return save(static)


def test_three_shards_answer_as_one_index(offsphere, collection, model, tmp_path):
    folders = [tmp_path / name for name in ("whole", "a", "b", "c")]
    for folder, shard in zip(folders, ("1/1", "1/3", "2/3", "3/3"), strict=True):
        assert offsphere("index", model, collection, "--shard", shard, "--out", folder)[0] == 0
    whole, *shards = folders
    asked = ("bee moon", "night star", "-k", 7, "--json")
    one, several = offsphere("search", whole, *asked), offsphere("search", shards[0], *asked, "--shards", *shards[1:])
    assert one[:2] == (0, several[1]) and len(json.loads(one[1])[1]["hits"]) == 7
    assert "exact search over 60 documents in 3 indexes" in several[2]
    runs = [tmp_path / "one.trec", tmp_path / "several.trec"]
    assert offsphere("search", whole, "--data", collection, "--run", runs[0])[0] == 0
    assert offsphere("search", shards[0], "--data", collection, "--run", runs[1], "--shards", *shards[1:])[0] == 0
    assert runs[0].read_bytes() == runs[1].read_bytes() != b""
    code, _, said = offsphere("search", shards[0], "bee", "--shards", whole)
    assert code == 1 and "every document must be in one index only" in said


def test_exports_of_shards_fill_one_table(offsphere, collection, model, tmp_path):
    target = f"lancedb:{tmp_path / 'store'}"
    written = []
    for number in (1, 2):
        code, printed, _ = offsphere(
            "export", "--model", model, "--data", collection, "--shard", f"{number}/2", "--to", target, "--json"
        )
        assert code == 0
        written.append(json.loads(printed)[0]["written"])
    assert sum(written) == 60 and min(written) > 0
    assert offsphere("verify", target, "--model", model, "--data", collection)[0] == 0


@pytest.mark.parametrize(("shard", "message"), [("3/2", "there is no shard 3 of 2"), ("half", "expected a shard I/N")])
def test_no_such_shard(offsphere, collection, model, tmp_path, shard, message):
    for command in (
        ("index", model, collection, "--out", tmp_path / "index"),
        ("export", "--model", model, "--data", collection, "--to", f"lancedb:{tmp_path / 'store'}"),
    ):
        code, _, said = offsphere(*command, "--shard", shard)
        assert code == 2 and message in said
    assert not (tmp_path / "index").exists() and not (tmp_path / "store").exists()
