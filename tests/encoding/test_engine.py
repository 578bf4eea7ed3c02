"""Encoding into a folder: the same rows however it is done, resumed after whatever ended it."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from offsphere.data.documents import read_documents
from offsphere.diagnosis.subject import open_bare
from offsphere.encoders import encode
from offsphere.encoding import encode_collection, open_embeddings
from offsphere.encoding.engine import Done
from offsphere.encoding.storage import MATRIX
from offsphere.errors import ConfigError, DataError, EmbeddingsError, EncoderError
from offsphere.progress import Silent
from offsphere.similarity import norms


def run(model, source, out, **settings) -> Done:
    (done,) = encode_collection(model, source, out, **settings)
    return done


def shards(out: Path) -> dict[int, dict]:
    return {shard["number"]: shard for shard in json.loads((out / "manifest.json").read_text())["shards"]}


class Steps(Silent):
    """Does something after each number of texts."""

    def __init__(self, act):
        self.act = act
        self.said: list[str] = []

    def say(self, text):
        self.said.append(text)

    def start(self, what, total):
        return self.act


@pytest.mark.parametrize("kind", ["model", "table"])
def test_what_is_written(request, kind, collection, tmp_path):
    model, source, out = request.getfixturevalue(kind), collection(), tmp_path / "out"
    done = run(model, source, out, shard_size=8, max_length=12)
    documents = list(read_documents(source))
    matrix = np.load(out / MATRIX, mmap_mode="r")
    assert isinstance(matrix, np.memmap) and matrix.dtype == np.float32
    bare = open_bare(model, 12, None, "cpu").model
    np.testing.assert_allclose(matrix, encode(bare, [one.passage for one in documents], "document"), atol=1e-5)
    assert (out / "ids.txt").read_text().splitlines() == [one.id for one in documents]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["finished"] and [len(manifest["shards"]), manifest["count"]] == [4, 30]
    assert [(shard["start"], shard["stop"]) for shard in manifest["shards"]] == [(0, 8), (8, 16), (16, 24), (24, 30)]
    assert manifest["empty"] == 1 and done.encoded == 29
    assert {path.name for path in out.iterdir()} == {MATRIX, "ids.txt", "manifest.json", "encode.lock"}


def test_the_same_rows_in_any_division_and_order(model, collection, tmp_path):
    source = collection(40)
    run(model, source, tmp_path / "whole")
    whole = np.load(tmp_path / "whole" / MATRIX)
    for name, settings in {"small": {"shard_size": 7}, "tokens": {"tokens": 9}}.items():
        run(model, source, tmp_path / name, **settings)
        found = np.load(tmp_path / name / MATRIX)
        assert (np.abs(found - whole).max(1) <= 1e-6 * np.maximum(norms(whole), 1e-30)).all()
    lines = (source / "corpus.jsonl").read_text().splitlines()
    (source / "corpus.jsonl").write_text("\n".join(reversed(lines)))
    run(model, source, tmp_path / "reversed")
    found = np.load(tmp_path / "reversed" / MATRIX)[::-1]
    assert (np.abs(found - whole).max(1) <= 1e-6 * np.maximum(norms(whole), 1e-30)).all()
    assert (tmp_path / "reversed" / "ids.txt").read_text().split() == [f"d{i}" for i in reversed(range(40))]


def test_both_sides_with_their_prompts(model, collection, tmp_path):
    """T-J1, T-J2 and rows 92, 93 and 96: each side has its prompt, which is said, and its tokens are counted."""
    source, prompts, steps = collection(), {"query": "why : "}, Steps(lambda texts: None)
    plain = encode_collection(model, source, tmp_path / "plain", sides=("query", "document"))
    prompted = encode_collection(
        model, source, tmp_path / "prompted", sides=("query", "document"), prompts=prompts, progress=steps
    )
    rest = "texts cut at 48 tokens, computed in float32"
    for said in ("query prompt 'why : ' (2 tokens)", "no document prompt"):
        assert f"{model} on {source}: {said}, {rest}" in steps.said
    queries, documents = zip(
        *((np.load(Path(one.place) / MATRIX) for one in run) for run in (plain, prompted)), strict=True
    )
    np.testing.assert_array_equal(*documents)
    assert (np.abs(queries[0] - queries[1]).max(1) > 1e-3).all()  # the canary: a prompt that changes nothing is lost
    assert prompted[0].manifest.prompts == prompts and prompted[0].manifest.prompt_tokens == {"query": 2}
    assert prompted[1].manifest.prompts == {"document": ""} and prompted[1].manifest.prompt_tokens == {"document": 0}
    six = prompted[0].manifest.total("tokens") - plain[0].manifest.total("tokens")
    assert six == 6 * 2


def test_the_collections_prompt_comes_before_the_models_and_the_flag_before_both(
    transformer, save, collection, tmp_path
):
    transformer.prompts |= {"document": "the : "}
    model, source = str(save(transformer)), collection()
    assert run(model, source, tmp_path / "a").manifest.prompts == {"document": "the : "}
    (source / "collection.yaml").write_text("prompts:\n  document: 'what : '\n")
    assert run(model, source, tmp_path / "b").manifest.prompts == {"document": "what : "}
    assert run(model, source, tmp_path / "c", prompts={"document": ""}).manifest.prompts == {"document": ""}


def test_what_is_cut_is_counted(model, collection, tmp_path):
    """T-J4: how many texts, how many tokens, and their share."""
    done = run(model, collection(), tmp_path / "out", max_length=5, shard_size=10).manifest
    words = [len(one.passage.split()) for one in read_documents(tmp_path / "collection")]
    assert done.total("cut") == sum(number > 3 for number in words) > 0
    assert done.total("tokens_lost") == sum(max(0, number - 3) for number in words)
    assert done.total("tokens") == sum(min(number, 3) + 2 for number in words if number)
    share = json.loads((tmp_path / "out" / "manifest.json").read_text())["tokens_lost_share"]
    assert share == pytest.approx(done.total("tokens_lost") / (done.total("tokens_lost") + done.total("tokens")))


def test_killed_and_resumed(model, collection, tmp_path):
    """SIGKILL while it runs; the same command keeps every finished shard and gives the same bytes.

    T-I4 as well: the process that is killed has neither Python's UTF-8 mode nor a locale with UTF-8.
    """
    source, out = collection(3000), tmp_path / "out"
    corpus = (source / "corpus.jsonl").read_text(encoding="utf-8")
    odd = corpus.replace('"d3"', '"\u00e9"', 1).replace('"d5"', '"e\u0301\u2028\u05d0"', 1)
    (source / "corpus.jsonl").write_bytes(odd.replace("\n", "\r\n").encode("utf-8-sig"))
    command = [sys.executable, "-m", "offsphere", "encode", model, str(source), "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--shard-size", "50"],
        env=os.environ | {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "manifest.json").exists() and len(shards(out)) >= 3:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = shards(out)
    assert 3 <= len(before) < 60  # else nothing was interrupted
    assert (out / "ids.txt").read_bytes().decode().split("\n")[2:6] == ["d2", "\u00e9", "d4", "e\u0301\u2028\u05d0"]
    with pytest.raises(EmbeddingsError, match=r"only \d+ of 60 shards are finished"):
        open_embeddings(out)
    done = run(model, source, out)
    after = shards(out)
    assert done.kept == len(before) and len(after) == 60 and done.manifest.shard_size == 50
    assert all(after[number] == shard for number, shard in before.items())  # times among them
    assert done.encoded == sum(shard["encoded"] for number, shard in after.items() if number not in before)
    run(model, source, tmp_path / "at_once", shard_size=50)
    for name in (MATRIX, "ids.txt"):
        assert (out / name).read_bytes() == (tmp_path / "at_once" / name).read_bytes()


def test_again_encodes_nothing_and_a_change_only_its_shard(model, collection, tmp_path):
    source, out = collection(), tmp_path / "out"
    run(model, source, out, shard_size=8)
    before, written = shards(out), (out / MATRIX).read_bytes()
    again = run(model, source, out)
    assert (again.kept, again.encoded) == (4, 0) and shards(out) == before and (out / MATRIX).read_bytes() == written
    lines = (source / "corpus.jsonl").read_text().splitlines()
    lines[9] = json.dumps({"_id": "d9", "text": "bee dance honey"})
    lines.append(json.dumps({"_id": "d30", "text": "fire"}))
    (source / "corpus.jsonl").write_text("\n".join(lines))
    changed = run(model, source, out)
    assert (changed.kept, changed.damaged, changed.manifest.count) == (2, [], 31)
    assert [number for number, shard in shards(out).items() if shard != before.get(number)] == [1, 3]
    (tmp_path / "fresh").mkdir()
    run(model, source, tmp_path / "fresh", shard_size=8)
    assert (out / MATRIX).read_bytes() == (tmp_path / "fresh" / MATRIX).read_bytes()


def test_a_corrupt_shard_alone_is_encoded_again(model, collection, tmp_path):
    source, out = collection(), tmp_path / "out"
    run(model, source, out, shard_size=8)
    before, written = shards(out), (out / MATRIX).read_bytes()
    broken = bytearray(written)
    broken[128 + 4 * 32 * 17] ^= 1  # one bit of row 17, in shard 2
    (out / MATRIX).write_bytes(broken)
    with pytest.raises(EmbeddingsError, match=r"shard 2 of .* is damaged"):
        list(open_embeddings(out).shards())
    done = run(model, source, out)
    assert (done.kept, done.damaged, done.encoded) == (3, [2], 8)
    assert (out / MATRIX).read_bytes() == written
    assert [number for number, shard in shards(out).items() if shard != before[number]] == [2]


def test_a_file_cut_short_loses_only_what_is_missing(model, collection, tmp_path):
    source, out = collection(), tmp_path / "out"
    run(model, source, out, shard_size=8)
    written = (out / MATRIX).read_bytes()
    (out / MATRIX).write_bytes(written[: 128 + 4 * 32 * 20])
    with pytest.raises(EmbeddingsError, match="cannot be read"):
        _ = open_embeddings(out).matrix
    assert run(model, source, out).damaged == [2, 3]
    assert (out / MATRIX).read_bytes() == written


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_fills_up(model, collection, tmp_path, small_disk):
    """No space left on a real file system, after two shards; they stay, and the rest comes once there is room."""
    source, out, filler = collection(160), small_disk / "out", small_disk / "filler"

    def fill(texts: int) -> None:
        if texts == 80:
            try:
                filler.write_bytes(bytes(2**20))
            except OSError as error:
                assert error.errno == errno.ENOSPC

    with pytest.raises(EmbeddingsError, match=r"No space left on device\. 2 of 4 shards are stored and stay"):
        run(model, source, out, shard_size=40, progress=Steps(fill))
    assert len(shards(out)) == 2 and not list(out.glob("*.tmp"))
    filler.unlink()
    done = run(model, source, out)
    assert (done.kept, done.damaged) == (2, []) and done.manifest.finished


def test_a_disk_without_room_is_found_before_encoding(model, collection, small_disk):
    with pytest.raises(EmbeddingsError, match=r"needs 0 MB more, and its disk has 0 MB left; make room"):
        run(model, collection(3000), small_disk / "out", progress=Steps(lambda texts: pytest.fail("encoded")))


def test_a_limit_on_the_size_of_files(model, collection, tmp_path):
    source, out = collection(80), tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (128 + 4 * 32 * 50, limits[1]))
        with pytest.raises(EmbeddingsError, match=r"cannot write shard 2 to .*: File too large\. 2 of 4 shards"):
            run(model, source, out, shard_size=20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run(model, source, out).kept == 2


def test_workers_give_the_same_bytes_and_one_that_is_killed_is_named(model, collection, tmp_path):
    source, out = collection(400), tmp_path / "out"
    killed: list[int] = []

    def kill(texts: int) -> None:
        if not killed:
            workers = [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
            assert len(workers) == 2
            killed.append(workers[0].pid)
            os.kill(workers[0].pid, signal.SIGKILL)

    with pytest.raises(EmbeddingsError, match="one of the worker processes was killed"):
        run(model, source, out, shard_size=10, workers=2, progress=Steps(kill))
    by_workers = shards(out)
    assert killed and 1 <= len(by_workers) < 40
    done = run(model, source, out)
    assert done.kept == len(by_workers)
    run(model, source, tmp_path / "alone", shard_size=10)
    alone = shards(tmp_path / "alone")
    assert all(alone[number]["checksum"] == shard["checksum"] for number, shard in by_workers.items())
    assert (out / MATRIX).read_bytes() == (tmp_path / "alone" / MATRIX).read_bytes()


def test_a_script_without_a_guard_is_told_what_it_lacks(model, collection, tmp_path):
    """T-L5, row 123: a worker first runs the script again, which must not be taken for a lack of memory."""
    source = collection(40)
    call = "encode_collection({!r}, {!r}, {!r}, shard_size=10, workers=2)\n"
    ended = {}
    for name, guard in (("bare", ""), ("guarded", 'if __name__ == "__main__":\n    ')):
        script, out = tmp_path / f"{name}.py", tmp_path / name
        line = call.format(model, str(source), str(out))
        script.write_text(f"from offsphere.encoding import encode_collection\n\n{guard}{line}", encoding="utf-8")
        ended[name] = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    stderr = ended["bare"].stderr
    assert ended["bare"].returncode != 0 and "want of memory" not in stderr
    for said in ("a worker process cannot start workers of its own", "a worker process could not begin"):
        told = [line for line in stderr.splitlines() if f"UsageError: {said}" in line]
        assert told and all('put what it does under `if __name__ == "__main__":`' in line for line in told)
    assert ended["guarded"].returncode == 0, ended["guarded"].stderr
    run(model, source, tmp_path / "alone", shard_size=10)
    for file in (MATRIX, "ids.txt"):
        assert (tmp_path / "guarded" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_length": 7}, "a limit of 48 tokens, not 7"),
        ({"prompts": {"document": "the : "}}, "the prompts .*, not {'document': 'the : '}"),
        ({"sides": ("query",)}, "the side document, not query"),
        ({"shard_size": 9}, "shards of 8, not 9"),
        ({"precision": "bf16"}, "the precision float32, not bf16"),
    ],
)
def test_another_way_of_encoding_is_refused(model, collection, tmp_path, settings, named):
    source, out = collection(), tmp_path / "out"
    run(model, source, out, shard_size=8)
    written = (out / MATRIX).read_bytes()
    with pytest.raises(EmbeddingsError, match=named):
        run(model, source, out, **settings)
    assert (out / MATRIX).read_bytes() == written


def test_another_model_is_refused(model, table, collection, tmp_path):
    source, out = collection(), tmp_path / "out"
    run(model, source, out)
    with pytest.raises(EmbeddingsError, match=r"the model \(fingerprint .*32 dimensions, not 16"):
        run(table, source, out)


def test_two_commands_do_not_write_at_once(model, collection, tmp_path):
    source, out = collection(), tmp_path / "out"
    refused = []

    def again(texts: int) -> None:
        with pytest.raises(EmbeddingsError, match="another process is encoding") as error:
            run(model, source, out)
        refused.append(error)

    run(model, source, out, progress=Steps(again))
    assert refused


def test_an_embedding_that_is_not_finite_is_named(transformer, save, collection, tmp_path):
    transformer[0].auto_model.embeddings.word_embeddings.weight.data[5:] = np.nan
    with pytest.raises(EncoderError, match="are NaN or infinite, such as that of 'd0'"):
        run(str(save(transformer)), collection(), tmp_path / "out")


def test_the_time_left_is_told(model, collection, tmp_path, monkeypatch):
    monkeypatch.setattr("offsphere.encoding.engine.SECONDS_BETWEEN_LINES", 0.0)
    steps = Steps(lambda texts: None)
    run(model, collection(), tmp_path / "out", shard_size=10, progress=steps)
    told = r"[\d,]+ of [\d,]+ texts, [\d.,]+ a second, about \d+ s left"  # more than 0 where the machine is busy
    assert sum(re.fullmatch(told, line) is not None for line in steps.said) == 2


def test_odd_files(table, tmp_path):
    """T-I1, T-I4 and row 88: BOM, CRLF, U+2028, right to left, NFC and NFD ids, null text, whole numbers as ids."""
    rows = [
        {"_id": 7, "title": None, "text": "moon"},
        {"_id": "\u00e9", "text": "tide\u2028salt"},
        {"_id": "e\u0301", "text": "salt"},
        {"_id": "\u05d0", "text": "\u05d9\u05e8\u05d7 moon"},
        {"_id": "a\u2028b", "title": "ice", "text": None},
        {"_id": "none", "title": None, "text": None},
    ]
    source = tmp_path / "odd.jsonl"
    content = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n"
    source.write_bytes(content.encode("utf-8-sig"))
    done = run(table, source, tmp_path / "out")
    embeddings = open_embeddings(tmp_path / "out")
    assert embeddings.ids == ["7", "\u00e9", "e\u0301", "\u05d0", "a\u2028b", "none"]
    texts = ["moon", "tide\u2028salt", "salt", "\u05d9\u05e8\u05d7 moon", "ice", ""]
    model = open_bare(table, None, None, "cpu").model
    np.testing.assert_allclose(embeddings.matrix, encode(model, texts, "document"), rtol=1e-5)
    assert (embeddings.matrix[-1] == 0).all() and done.manifest.total("empty") == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"_id": "a", "text": "moon"}\n{"_id": "b"}\n', "2: text is missing"),
        ('{"_id": "a", "text": "moon"}\n{"_id": "a", "text": "ice"}\n', "2: the _id 'a' occurs twice"),
        ('{"_id": "a\\nb", "text": "moon"}\n', "holds a line feed"),
        ('{"_id": "a", "text": NaN}\n', "1: text must be a string or null"),
    ],
)
def test_malformed_files_are_named_and_nothing_is_written(table, tmp_path, content, named):
    """T-I1: no NaN is guessed to be a text."""
    source = tmp_path / "a.jsonl"
    source.write_text(content)
    with pytest.raises(DataError, match=f"a.jsonl:.*{named}"):
        run(table, source, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_gzip_stream_that_is_cut_off(table, collection, tmp_path):
    source = collection(400)
    whole = gzip.compress((source / "corpus.jsonl").read_bytes())
    (source / "corpus.jsonl").unlink()
    (source / "corpus.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"corpus\.jsonl\.gz: the gzip stream cannot be read on after line \d+"):
        run(table, source, tmp_path / "out")
    (source / "corpus.jsonl.gz").write_bytes(whole)
    assert run(table, source, tmp_path / "out").manifest.count == 400


def test_half_precision_is_near_and_stored_in_float32(model, collection, tmp_path):
    source = collection()
    for precision in ("float32", "bf16"):
        run(model, source, tmp_path / precision, precision=precision)
    exact, found = (np.load(tmp_path / precision / MATRIX) for precision in ("float32", "bf16"))
    assert found.dtype == np.float32
    errors = np.abs(found - exact).max(1)
    assert 0 < errors.max() and (errors <= 0.05 * norms(exact)).all()


def test_settings_that_make_no_sense(table, collection, tmp_path):
    with pytest.raises(ConfigError, match="--precision is one of float32, bf16, fp16, int8; found 'half'"):
        run(table, tmp_path, tmp_path / "out", precision="half")
    with pytest.raises(ConfigError, match="at least 1"):
        run(table, collection(), tmp_path / "out", tokens=0)
    with pytest.raises(DataError, match="a file has documents only"):
        run(table, tmp_path / "collection" / "corpus.jsonl", tmp_path / "out", sides=("query",))
