"""Embeddings servers that behave and misbehave, each a real HTTP server with a real encoder behind it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from offsphere.encoders import encode
from offsphere.errors import ConfigError, EncoderError
from offsphere.search.endpoint import PROBES, Endpoint, verify_endpoint
from offsphere.similarity import Similarity

COSINE = Similarity.parse("cosine")
Embed = Callable[[list[str]], np.ndarray]


@contextmanager
def serving(answer: Callable[[dict, dict], tuple[int, bytes]]) -> Iterator[str]:
    """A server whose answers to a POST are made from its JSON body and its headers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = answer(body, {"path": self.path, **self.headers})
            self.send_response(status)
            self.end_headers()
            with suppress(ConnectionError):  # the client has heard enough
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def openai(embed: Embed) -> Callable[[dict, dict], tuple[int, bytes]]:
    """Answers as OpenAI does, in an order of its own: the index says which is which."""
    lock = threading.Lock()

    def answer(body: dict, headers: dict) -> tuple[int, bytes]:
        with lock:
            embeddings = embed(body["input"])
        rows = [{"object": "embedding", "index": i, "embedding": row.tolist()} for i, row in enumerate(embeddings)]
        return 200, json.dumps({"object": "list", "model": body["model"], "data": rows[::-1]}).encode()

    return answer


@pytest.fixture
def check(transformer, save):
    """Runs the probe of a server that embeds in a given way, against the saved transformer."""
    transformer.prompts.update(query="why ", document="of ")
    folder = str(save(transformer))
    settings = Path(folder, "config_sentence_transformers.json")
    declared = json.loads(settings.read_text(encoding="utf-8"))
    assert declared.pop("similarity_fn_name") == "cosine"  # written for a model that says nothing
    settings.write_text(json.dumps(declared), encoding="utf-8")

    def check(embed: Embed, model: str = folder, **options):
        with serving(openai(embed)) as url:
            return verify_endpoint(url, model, **options)

    return check


@pytest.fixture
def plain(transformer) -> Embed:
    return lambda texts: encode(transformer, texts, "query", prompt="")


def verdicts(found) -> dict[str, tuple[bool, bool]]:
    return {one.similarity: (one.ranks, one.scores) for one in found.served}


def test_a_faithful_server_keeps_every_similarity(check, plain):
    found = check(plain)
    assert found.passed and found.own is None and found.same_direction and found.deterministic and found.order_kept
    assert set(verdicts(found).values()) == {(True, True)}
    assert found.ratio == pytest.approx(1, abs=1e-5) and found.gamma == pytest.approx(0, abs=1e-3)
    assert found.norm_cv == pytest.approx(found.own_norm_cv, rel=1e-4) and found.own_norm_cv > 0.02
    assert found.dimension == found.own_dimension == 32
    assert "put 'why ' before each query and 'of ' before each document yourself" in found.encoding
    assert found.long_text == "cut as by the model, after 48 tokens"
    assert json.loads(json.dumps(found.to_dict()))["passed"] is True


def test_a_server_that_normalises_serves_the_direction_only(check, plain):
    found = check(lambda texts: COSINE.prepare_document(plain(texts)))
    assert not found.passed and found.same_direction
    assert verdicts(found) == {
        "cosine": (True, True), "dot": (False, False), "qnorm": (False, False), "dnorm": (True, False),
    }  # fmt: skip
    assert (found.norm_mean, found.gamma) == (pytest.approx(1), pytest.approx(1, abs=1e-3))
    assert found.norm_cv < 1e-6 < found.own_norm_cv
    assert check(lambda texts: COSINE.prepare_document(plain(texts)), similarity="cosine").passed
    assert not check(lambda texts: COSINE.prepare_document(plain(texts)), similarity="qnorm").passed


def test_a_factor_keeps_the_order(check, plain):
    found = check(lambda texts: 2 * plain(texts), similarity="dot")
    assert found.passed and verdicts(found)["dot"] == (True, False) and found.ratio == pytest.approx(2)


@pytest.mark.parametrize(("side", "prompt"), [("query", "why "), ("document", "of ")])
def test_a_prompt_that_the_server_adds_by_itself(check, plain, side, prompt):
    found = check(lambda texts: plain([prompt + text for text in texts]))
    assert not found.passed and found.same_direction and f"its {side} prompt {prompt!r}" in found.encoding
    assert set(verdicts(found).values()) == {(False, False)}
    assert "to the other side as well" in found.served[0].sentence
    assert found.gamma == pytest.approx(0, abs=1e-3)


def test_another_pooling_is_named(check, transformer):
    other = transformer
    other[1].pooling_mode = "cls"
    found = check(lambda texts: encode(other, texts, "query", prompt=""))
    assert not found.passed and not found.same_direction and "cls pooling" in found.encoding


def test_another_model_is_told_apart(check):
    random = np.random.default_rng(0)
    table = {}

    def embed(texts: list[str]) -> np.ndarray:
        return np.array([table.setdefault(text, random.normal(size=32)) for text in texts])

    found = check(embed, similarity="cosine")
    assert not found.passed and "another model" in found.encoding and found.long_text == "not compared"


def test_another_dimension_is_an_error(check):
    with pytest.raises(EncoderError, match=r"gives 8 dimensions and .* 32"):
        check(lambda texts: np.ones((len(texts), 8)))


def test_an_order_that_is_mixed_up(check, plain):
    found = check(lambda texts: np.roll(plain(texts), 1, axis=0))
    assert not found.order_kept and not found.passed


def test_embeddings_that_change_from_one_request_to_the_next(check, plain):
    random = np.random.default_rng(0)
    found = check(lambda texts: plain(texts) * random.uniform(0.99, 1.01))
    assert not found.deterministic and not found.passed and found.order_kept


def test_a_shorter_limit_shows_in_a_long_text(check, transformer):
    transformer.max_seq_length = 12
    found = check(
        lambda texts: encode(transformer, texts, "query", prompt=""),
        texts=["sea", "ice cold", "a star is hot", "salt water", "the moon"],
    )
    assert found.same_direction and "read differently" in found.long_text


def test_a_refused_long_text_is_no_failure(check, plain):
    def embed(texts: list[str]) -> np.ndarray:
        return plain(texts) if len(texts[0]) < 300 else np.zeros((0, 32))

    found = check(embed)
    assert found.passed and found.long_text.startswith("refused: ")


def test_a_static_table_has_no_limit(static, save, sentences):
    folder = str(save(static, "static"))
    with serving(openai(lambda texts: encode(static, texts, "query"))) as url:
        found = verify_endpoint(url, folder, texts=sentences(8, 0), similarity="dot")
    assert found.passed and found.long_text == "read as by the model"


def test_the_probes_differ_in_length():
    assert len(set(PROBES)) == len(PROBES) >= 10
    assert min(map(len, PROBES)) * 10 < max(map(len, PROBES))


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://h:1", "http://h:1/v1/embeddings"),
        ("http://h:1/v1/", "http://h:1/v1/embeddings"),
        ("https://h/api/v3/embeddings?x=1", "https://h/api/v3/embeddings?x=1"),
    ],
)
def test_the_path_is_completed_where_there_is_none(given, asked):
    assert Endpoint(given, "m").url == asked


@pytest.mark.parametrize("url", ["localhost:8080", "file:///etc/passwd", "ftp://h", "http://"])
def test_only_http_addresses(url):
    with pytest.raises(ConfigError, match="expected an address such as"):
        Endpoint(url, "m")


def test_what_is_sent(monkeypatch):
    monkeypatch.setenv("SECRET", "k3y")
    seen: list[tuple[dict, dict]] = []

    def answer(body: dict, headers: dict) -> tuple[int, bytes]:
        seen.append((body, headers))
        return 200, json.dumps({"data": [{"embedding": [1.0, 2.0]} for _ in body["input"]]}).encode()

    with serving(answer) as url:
        embeddings = Endpoint(url, "bge", "SECRET").embed(["a", "b"])
    assert embeddings.tolist() == [[1, 2], [1, 2]] and embeddings.dtype == np.float32
    ((body, headers),) = seen
    assert body == {"model": "bge", "input": ["a", "b"], "encoding_format": "float"}
    assert headers["Authorization"] == "Bearer k3y" and headers["path"] == "/v1/embeddings"
    with pytest.raises(ConfigError, match="NOWHERE, which is not set"):
        Endpoint("http://h", "m", "NOWHERE")


@pytest.mark.parametrize(
    ("status", "content", "says"),
    [
        (401, b"no key", "HTTP 401: no key; give the environment variable"),
        (404, b"", "HTTP 404: .*--name"),
        (500, b"x" * 10_000, "HTTP 500: x{500}$"),
        (200, b"<html>hello</html>", "expected JSON, found '<html>hello"),
        (200, b"\xff\xfe", "expected JSON"),
        (200, b"[]", r'expected \{"data"'),
        (200, b'{"error": "loading"}', "loading"),
        (200, b'{"data": [{"embedding": [1]}]}', "2 texts were sent and 1 embeddings came back"),
        (200, b'{"data": [{"embedding": [1]}, {"embedding": [1, 2]}]}', "no lists of as many numbers"),
        (200, b'{"data": [{"embedding": "AAAA"}, {"embedding": "AAAA"}]}', "no lists of as many numbers"),
        (200, b'{"data": [{"embedding": []}, {"embedding": []}]}', "shape"),
        (200, b'{"data": [{"embedding": [NaN]}, {"embedding": [1]}]}', "NaN"),
        (200, b'{"data": [{"embedding": [1], "index": 0}, {"embedding": [1], "index": 0}]}', "indexes"),
        (200, b'{"data": [{"embedding": [1], "index": null}, {"embedding": [1], "index": 0}]}', "indexes"),
    ],
)
def test_wrong_answers_are_told(status, content, says):
    with serving(lambda body, headers: (status, content)) as url, pytest.raises(EncoderError, match=says) as error:
        Endpoint(url, "m").embed(["a", "b"])
    assert str(error.value).startswith(url)


def test_an_endless_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr("offsphere.search.endpoint.LARGEST_ANSWER", 1000)
    with serving(lambda body, headers: (200, b" " * 5000)) as url, pytest.raises(EncoderError, match="longer than"):
        Endpoint(url, "m").embed(["a"])


def test_nobody_listens():
    with serving(lambda body, headers: (200, b"")) as url:
        pass
    with pytest.raises(EncoderError, match=r"cannot reach .*start the server"):
        verify_endpoint(url, "never opened")


def test_a_server_that_does_not_answer():
    def answer(body: dict, headers: dict) -> tuple[int, bytes]:
        time.sleep(0.5)
        return 200, b"{}"

    with serving(answer) as url, pytest.raises(EncoderError, match=r"did not answer within 0.1 s"):
        Endpoint(url, "m", timeout=0.1).embed(["a"])


def test_too_few_texts():
    with pytest.raises(ConfigError, match="at least 4 different texts"):
        verify_endpoint("http://h", "m", texts=["a", "a", "b", " "])
