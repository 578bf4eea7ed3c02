from __future__ import annotations

import json
from dataclasses import replace

import datasets
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from offsphere.data import TrainingPairs, load_pairs
from offsphere.data.fingerprint import text_id
from offsphere.errors import ConfigError, DataError

ROWS = [
    {"query": "why tides", "positive": "the moon", "negative_1": "rust", "negative_2": "bees"},
    {"query": "why tides", "positive": "gravity", "negative_1": "bees", "negative_2": "NA"},
    {"query": "what is salt", "positive": "the moon", "negative_1": "nan", "negative_2": "rust"},
]


def pairs(name: str = "made", queries: int = 10, each: int = 2, negatives: int = 1) -> TrainingPairs:
    rows = [(query, query * each + step) for query in range(queries) for step in range(each)]
    return TrainingPairs(
        name=name,
        queries=[f"{name} question {query}" for query, _ in rows],
        positives=[f"{name} answer {document}" for _, document in rows],
        negatives=[[f"{name} wrong {column} {document}" for _, document in rows] for column in range(negatives)],
        query_ids=[f"{name}/q{query}" for query, _ in rows],
        positive_ids=[f"{name}/d{document}" for _, document in rows],
        negative_ids=[[f"{name}/n{column}-{document}" for _, document in rows] for column in range(negatives)],
        relevant={
            f"{name}/q{query}": frozenset(f"{name}/d{query * each + step}" for step in range(each))
            for query in range(queries)
        },
    )


def rows_of(made: TrainingPairs) -> list[tuple[str, ...]]:
    columns = [made.query_ids, made.queries, made.positive_ids, made.positives, *made.negative_ids, *made.negatives]
    return list(zip(*columns, strict=True))


def as_jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_delimited(rows, delimiter) -> str:
    return "".join(delimiter.join(line) + "\n" for line in [rows[0], *(row.values() for row in rows)])


@pytest.fixture(params=["jsonl", "jsonl.gz", "csv", "csv.gz", "tsv", "tsv.gz", "parquet", "saved"])
def source(request, tmp_path, write):
    """The same rows in every format."""
    path = tmp_path / f"rows.{request.param}"
    match request.param.removesuffix(".gz"):
        case "jsonl":
            write(path, as_jsonl(ROWS))
        case "csv":
            write(path, as_delimited(ROWS, ","))
        case "tsv":
            write(path, as_delimited(ROWS, "\t"))
        case "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        case "saved":
            path = tmp_path / "rows"
            datasets.disable_progress_bars()
            datasets.Dataset.from_list(ROWS).save_to_disk(path)
    return path


def test_every_format_gives_the_same_pairs(source):
    loaded = load_pairs(source)
    assert loaded.name == "rows"
    assert loaded.queries == ["why tides", "why tides", "what is salt"]
    assert loaded.positives == ["the moon", "gravity", "the moon"]
    assert loaded.negatives == [["rust", "bees", "nan"], ["bees", "NA", "rust"]]
    assert loaded.query_ids == [f"rows/{text_id(text)}" for text in loaded.queries]
    assert loaded.positive_ids[0] == loaded.positive_ids[2] != loaded.positive_ids[1]
    assert loaded.negative_ids[0][0] == loaded.negative_ids[1][2]
    assert loaded.relevant == {
        loaded.query_ids[0]: frozenset(loaded.positive_ids[:2]),
        loaded.query_ids[2]: frozenset(loaded.positive_ids[2:]),
    }
    assert loaded.notes == ()


def test_every_positive_judgement_of_a_collection_is_a_pair(make_collection):
    loaded = load_pairs(make_collection(split="train", settings="name: sea"))
    assert loaded.name == "sea"
    assert rows_of(loaded) == [
        ("sea/q1", "why are there tides", "sea/d1", "Tides The moon pulls the sea."),
        ("sea/q2", "what does water do to iron", "sea/d2", "Iron rusts in water."),
        ("sea/q2", "what does water do to iron", "sea/d1", "Tides The moon pulls the sea."),
    ]
    assert loaded.negatives == loaded.negative_ids == []
    assert loaded.relevant == {"sea/q1": frozenset({"sea/d1"}), "sea/q2": frozenset({"sea/d1", "sea/d2"})}


def test_empty_documents_of_a_collection_make_no_pair(make_collection, documents):
    folder = make_collection(documents=[{"_id": "d1", "text": None}, *documents[1:]])
    loaded = load_pairs(folder, "test")
    assert loaded.positive_ids == ["small/d2"]
    assert loaded.notes == ("1 document without text", "2 rows with an empty query or document left out")
    with pytest.raises(DataError, match="every pair of split 'test' has an empty text"):
        load_pairs(make_collection("empty", documents=[{"_id": "d1", "text": ""}], qrels="q1\td1\t1\n"), "test")


def test_a_dataset_on_the_hub(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: datasets.Dataset.from_list(ROWS))
    loaded = load_pairs("owner/name:triplet")
    assert loaded.name == "owner/name:triplet"
    assert loaded.queries == [row["query"] for row in ROWS]


@pytest.mark.parametrize(
    ("columns", "negatives"),
    [
        (["anchor", "positive", "negative"], ["negative"]),
        (["label", "positive", "query"], []),
        (
            ["negative_10", "negative_2", "query", "positive", "negative_1", "negative_x"],
            ["negative_1", "negative_2", "negative_10"],
        ),
    ],
)
def test_columns_by_their_accepted_names(tmp_path, write, columns, negatives):
    loaded = load_pairs(write(tmp_path / "a.jsonl", as_jsonl([{name: f"the {name}" for name in columns}])))
    assert loaded.queries == ["the anchor" if "anchor" in columns else "the query"]
    assert loaded.positives == ["the positive"]
    assert loaded.negatives == [[f"the {name}"] for name in negatives]


def test_ids_in_the_file_are_used(tmp_path, write):
    rows = [
        {"query": "a", "query_id": 7, "positive": "b", "negative": "c", "negative_id": "n"},
        {"query": "a", "query_id": 8, "positive": "d", "negative": "c", "negative_id": "n"},
    ]
    loaded = load_pairs(write(tmp_path / "f.jsonl", as_jsonl(rows)))
    assert loaded.query_ids == ["f/7", "f/8"]
    assert loaded.positive_ids == [f"f/{text_id('b')}", f"f/{text_id('d')}"]
    assert loaded.negative_ids == [["f/n", "f/n"]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            ["question", "answer"],
            r"a\.jsonl: found the columns question, answer; expected query \(or anchor\), positive",
        ),
        (["query", "negative"], "found the columns query, negative; expected"),
        (
            ["sentence1", "sentence2", "score"],
            "symmetric task, where cosine is right .* rename them query and positive",
        ),
    ],
)
def test_other_columns_are_errors(tmp_path, write, columns, message):
    with pytest.raises(DataError, match=message):
        load_pairs(write(tmp_path / "a.jsonl", as_jsonl([dict.fromkeys(columns, "text")])))


def test_rows_with_an_empty_text_are_left_out_and_counted(tmp_path, write):
    rows = [
        {"query": "a", "positive": "b", "negative": "c"},
        {"query": "", "positive": "b", "negative": "c"},
        {"query": "a", "positive": None, "negative": "c"},
        {"query": "a", "positive": "b", "negative": " "},
    ]
    loaded = load_pairs(write(tmp_path / "a.jsonl", as_jsonl(rows)))
    assert loaded.queries == ["a"]
    assert loaded.notes == (
        "2 rows with an empty query or positive left out",
        "1 row with an empty negative left out",
    )
    with pytest.raises(DataError, match="every row has an empty text"):
        load_pairs(write(tmp_path / "b.jsonl", as_jsonl(rows[1:])))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "a"}, r"a\.jsonl:3: positive is missing; found the fields query"),
        ({"query": "a", "positive": ["b", "c"]}, r":3: positive must be a string or null, found list \['b', 'c'\]"),
    ],
)
def test_malformed_rows_are_errors(tmp_path, write, row, message):
    content = as_jsonl([{"query": "a", "positive": "b"}]) + "\n" + as_jsonl([row])
    with pytest.raises(DataError, match=message):
        load_pairs(write(tmp_path / "a.jsonl", content))


def test_sources_that_cannot_be_pairs(tmp_path, write):
    with pytest.raises(DataError, match=r"a\.jsonl: no rows; expected the columns query"):
        load_pairs(write(tmp_path / "a.jsonl", ""))
    with pytest.raises(DataError, match=r"b\.csv\.gz: no such file"):
        load_pairs(tmp_path / "b.csv.gz")
    with pytest.raises(DataError, match=r"c\.txt: expected a file that ends in \.jsonl, \.csv, \.tsv, \.parquet"):
        load_pairs(write(tmp_path / "c.txt", "text"))
    with pytest.raises(DataError, match="no training pairs in this folder; a collection is a folder"):
        load_pairs(tmp_path)


@given(number=st.integers(1, 25), seed=st.integers(0, 20))
def test_a_sample_is_that_many_rows_in_their_order(number, seed):
    whole = pairs()
    part = whole.sample(number, seed)
    rows = rows_of(whole)
    places = [rows.index(row) for row in rows_of(part)]
    assert len(part) == min(number, 20)
    assert places == sorted(set(places))
    assert part.relevant == {query: whole.relevant[query] for query in part.query_ids}
    assert part == whole.sample(number, seed)


def test_samples_of_other_seeds_differ():
    assert len({tuple(pairs().sample(5, seed).positive_ids) for seed in range(5)}) > 1
    with pytest.raises(ConfigError, match="at least one row, found 0"):
        pairs().sample(0)


@given(part=st.integers(1, 9) | st.floats(0.06, 0.94), seed=st.integers(0, 20))
def test_splitting_off_keeps_the_rows_of_a_query_together(part, seed):
    whole = pairs()
    train, held_out = whole.split_off(part, seed)
    assert set(train.query_ids).isdisjoint(held_out.query_ids)
    assert sorted(rows_of(train) + rows_of(held_out)) == sorted(rows_of(whole))
    assert len(set(held_out.query_ids)) == (part if isinstance(part, int) else round(10 * part))
    assert train.relevant | held_out.relevant == whole.relevant


def test_splitting_off_does_not_depend_on_the_order_of_the_rows():
    whole = pairs()
    reversed_rows = whole._take(list(reversed(range(len(whole)))))
    held_out, same = whole.split_off(3, seed=1)[1], reversed_rows.split_off(3, seed=1)[1]
    assert set(held_out.query_ids) == set(same.query_ids) != set(whole.split_off(3, seed=2)[1].query_ids)


@pytest.mark.parametrize("part", [0, 10, -1, 0.0, 1.0, 0.01])
def test_splitting_off_nothing_or_everything_is_an_error(part):
    with pytest.raises(ConfigError, match="the 10 queries of made leaves one side empty"):
        pairs().split_off(part)


def test_concatenation():
    one, other = replace(pairs("one", 3), notes=("x",)), replace(pairs("other", 2), notes=("y",))
    both = TrainingPairs.concatenate([one, other])
    assert both.name == "one+other"
    assert rows_of(both) == rows_of(one) + rows_of(other)
    assert both.relevant == one.relevant | other.relevant
    assert both.notes == ("one: x", "other: y")
    assert TrainingPairs.concatenate([one]) is one


def test_concatenation_joins_what_is_relevant_to_one_query():
    whole = pairs(queries=1, each=2)
    halves = [replace(whole._take([row]), relevant={"made/q0": frozenset({f"made/d{row}"})}) for row in range(2)]
    joined = TrainingPairs.concatenate(halves)
    assert rows_of(joined) == rows_of(whole)
    assert (joined.name, joined.relevant) == ("made", whole.relevant)


def test_concatenation_without_negatives(make_collection):
    parts = [load_pairs(make_collection(name), "test") for name in ("a", "b")]
    both = TrainingPairs.concatenate(parts)
    assert len(both) == 6
    assert both.negatives == both.negative_ids == []
    assert len(set(both.query_ids)) == 4


def test_what_cannot_be_concatenated(make_collection, tmp_path, documents):
    with pytest.raises(DataError, match="one has 1, other has 2; train on them apart"):
        TrainingPairs.concatenate([pairs("one"), pairs("other", negatives=2)])
    with pytest.raises(DataError, match="name at least one source"):
        TrainingPairs.concatenate([])
    other = make_collection("deeper/small", documents=[{"_id": d["_id"], "text": "other"} for d in documents])
    with pytest.raises(DataError, match=r"'small/d1' stands for two texts, .* two sources with one name"):
        TrainingPairs.concatenate([load_pairs(make_collection(), "test"), load_pairs(other, "test")])


def test_the_fingerprint_is_of_the_content_and_its_order(make_collection):
    whole = pairs()
    assert replace(whole, name="renamed", notes=("x",)).fingerprint() == pairs().fingerprint()
    changed = [
        whole._take(list(reversed(range(len(whole))))),
        replace(whole, queries=[text + "?" for text in whole.queries]),
        replace(whole, negatives=[[text + "?" for text in column] for column in whole.negatives]),
        replace(whole, negatives=[], negative_ids=[]),
        replace(whole, relevant=whole.relevant | {"made/q0": frozenset({"made/d9"})}),
    ]
    assert len({part.fingerprint() for part in [whole, *changed]}) == 1 + len(changed)
    zipped = [load_pairs(make_collection(suffix=suffix), "test").fingerprint() for suffix in ("", ".gz")]
    assert zipped[0] == zipped[1]


@pytest.mark.parametrize(
    "change",
    [
        {"queries": ["a"]},
        {"positive_ids": ["a"]},
        {"negatives": [["a"]]},
        {"negatives": []},
        {"query_ids": ["made/q0"] * 20},
    ],
)
def test_columns_that_do_not_fit_are_errors(change):
    with pytest.raises(DataError, match=r"every column must have|stands for two texts"):
        replace(pairs(), **change)


def test_a_document_may_be_positive_here_and_negative_there_but_has_one_text():
    whole = pairs()
    shifted = [whole.positives[2:] + whole.positives[:2]], [whole.positive_ids[2:] + whole.positive_ids[:2]]
    assert len(replace(whole, negatives=shifted[0], negative_ids=shifted[1])) == 20
    with pytest.raises(DataError, match="'made/d2' stands for two texts"):
        replace(whole, negative_ids=shifted[1])
