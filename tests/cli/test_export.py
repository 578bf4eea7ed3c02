"""``export``, ``verify`` and ``verify-endpoint`` from the command line: exit codes, machine output, what is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offsphere import cli


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process; gives its exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["offsphere", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
            sys.exit(0)
        written = capsys.readouterr()
        return int(end.value.code or 0), written.out, written.err

    return run


@pytest.fixture
def collection(tmp_path, sentences) -> str:
    folder = tmp_path / "collection"
    (folder / "qrels").mkdir(parents=True)
    for name, count, seed in (("corpus", 60, 0), ("queries", 5, 1)):
        rows = [json.dumps({"_id": f"{name}{i}", "text": text}) for i, text in enumerate(sentences(count, seed))]
        (folder / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    judged = "".join(f"queries{i}\tcorpus{i}\t1\n" for i in range(5))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged, encoding="utf-8")
    return str(folder)


@pytest.fixture
def model(static, save) -> str:
    static.similarity_fn_name = "dot"
    return str(save(static))


@pytest.fixture
def destinations(tmp_path) -> tuple[str, str]:
    return f"parquet:{tmp_path / 'a.parquet'}", f"lancedb:{tmp_path / 'lance'}"


def test_export_and_verify(run, model, collection, destinations):
    code, printed, _ = run("export", "--model", model, "--data", collection, "--to", *destinations, "--json")
    assert code == 0
    rows = json.loads(printed)
    assert [(row["target"], row["written"], row["stored"]) for row in rows] == [(one, 60, 60) for one in destinations]
    code, printed, _ = run("verify", destinations[1], "--model", model, "--data", collection, "--json")
    assert code == 0
    found = json.loads(printed)
    assert found["passed"] and found["overlap"] == 1.0 and found["queries"] == 5


def test_documents_without_text_are_said_to_be_left_out(run, model, collection, destinations):
    said = "left out as without text, never an answer: 1 document\n"
    arguments = ("export", "--model", model, "--data", collection, "--to", destinations[1])
    assert said not in run(*arguments)[1]
    with Path(collection, "corpus.jsonl").open("a", encoding="utf-8") as file:
        file.write('\n{"_id": "empty", "text": ""}')
    code, printed, _ = run(*arguments)
    assert code == 0 and said in printed and "0 documents written, 60 stored before, 60 stored now" in printed
    (row,) = json.loads(run(*arguments, "--json")[1])
    assert (row["empty"], row["stored"], row["extra"]) == (1, 60, 0)
    assert run("verify", destinations[1], "--model", model, "--data", collection)[0] == 0


def test_a_failed_verification_exits_1_and_names_the_cause(run, model, collection, destinations):
    target = destinations[0]
    assert run("export", "--model", model, "--data", collection, "--to", target, "--similarity", "cosine")[0] == 0
    code, printed, _ = run("verify", target, "--model", model, "--data", collection)
    shown = " ".join(printed.split())
    assert code == 1 and "does not rank as" in shown and "cause: normalised: normalised on upload" in shown
    code, printed, _ = run("verify", target, "--model", model, "--data", collection, "--similarity", "cosine")
    assert code == 0 and "overlap@10" in printed and "cause" not in printed


def test_an_index_in_place_of_a_model(run, model, collection, destinations, tmp_path):
    from offsphere.search.index import Index

    Index.create(tmp_path / "index", model, device="cpu").add(collection)
    code, printed, _ = run("export", "--index", str(tmp_path / "index"), "--to", destinations[0])
    assert code == 0 and "60 documents written, 0 stored before, 60 stored now" in printed
    assert run("verify", destinations[0], "--model", model, "--data", collection)[0] == 0


def test_explain_writes_nothing(run, model, collection, destinations, tmp_path):
    arguments = ("export", "--model", model, "--data", collection, "--to", *destinations, "--explain")
    code, printed, _ = run(*arguments)
    assert code == 0 and all(one in printed for one in destinations)
    assert not (tmp_path / "a.parquet").exists() and not (tmp_path / "lance").exists()
    assert "d as the model gives it" in printed and "not bounded by 1" in printed
    explained = json.loads(run(*arguments, "--json", "--similarity", "cosine")[1])
    assert set(explained) == set(destinations)
    assert all(one["stored"] == "d / |d|" and "cosine" in one["range"] for one in explained.values())


def test_explain_needs_no_documents_and_tells_what_would_be_lost(run, model):
    code, printed, _ = run("export", "--model", model, "--to", "qdrant-cosine", "--explain")
    assert code == 0 and "LOST: this ranks as cosine" in printed
    assert run("export", "--model", model, "--to", "nowhere", "--explain")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--to", "parquet:x.parquet"], 2, "give either --model MODEL with --data COLLECTION, or --index INDEX"),
        (["--model", "m", "--to", "parquet:x.parquet"], 2, "give either --model"),
        (["--index", "i", "--data", "c", "--to", "parquet:x.parquet"], 2, "give either --model"),
        (["--index", "i", "--max-length", "9", "--to", "parquet:x.parquet"], 2, "--max-length cannot change"),
        (["--index", "nowhere", "--to", "parquet:x.parquet"], 1, "nowhere"),
    ],
)
def test_wrong_requests(run, arguments, code, says):
    found, _, error = run("export", *arguments)
    assert found == code and says in " ".join(error.split())
    assert not Path("x.parquet").exists()


def test_an_unknown_destination(run, model, collection):
    code, _, error = run("export", "--model", model, "--data", collection, "--to", "milvis:x.db")
    assert code == 2 and "did you mean milvus?" in error


def test_nothing_to_verify(run, model, collection, destinations):
    code, _, error = run("verify", destinations[0], "--model", model, "--data", collection)
    assert code == 1 and "there is no collection at" in error


def test_an_endpoint_that_is_down(run, model):
    code, _, error = run("verify-endpoint", "http://127.0.0.1:9", "--model", model)
    assert code == 1 and "cannot reach http://127.0.0.1:9/v1/embeddings" in error
    assert run("verify-endpoint", "127.0.0.1:9", "--model", model)[0] == 2


@pytest.mark.parametrize(("factor", "code"), [(True, 0), (False, 1)])
def test_an_endpoint_that_is_up(run, transformer, save, factor, code):
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    from offsphere.encoders import encode
    from offsphere.similarity import Similarity

    transformer.similarity_fn_name = "dot"
    folder = str(save(transformer))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
            embeddings = encode(transformer, texts, "query")
            if not factor:
                embeddings = Similarity.parse("cosine").prepare_query(embeddings)
            rows = [{"index": place, "embedding": row.tolist()} for place, row in enumerate(embeddings)]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": rows}).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        found, printed, _ = run("verify-endpoint", url, "--model", folder)
        assert found == code
        shown = " ".join(printed.split())
        assert f"power of the length removed: {0 if factor else 1}.00" in shown and "dot (the model's own)" in shown
        assert json.loads(run("verify-endpoint", url, "--model", folder, "--json")[1])["passed"] is factor
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("command", ["export", "verify", "verify-endpoint"])
def test_help_shows_an_example(run, command):
    code, printed, _ = run(command, "--help")
    assert code == 0 and f"Example: offsphere {command}" in " ".join(printed.split())
