from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from offsphere.config import CompareConfig
from offsphere.errors import ConfigError, DataError
from offsphere.training.materials import load_materials

Write = Callable[..., Path]


@pytest.fixture
def asked() -> Callable[..., CompareConfig]:
    def make(train: list[object], eval: list[object], **settings: object) -> CompareConfig:
        paths = {"train": [str(one) for one in train], "eval": [str(one) for one in eval]}
        return CompareConfig(model="m", out=Path("o"), **paths, **settings)

    return make


@pytest.fixture
def without_dev(tmp_path: Path, write_collection: Write) -> Path:
    return write_collection(tmp_path / "plain", {"train": 40, "test": 10}, seed=5)


def test_a_dev_split_is_what_validation_uses(asked: Callable[..., CompareConfig], home: Path, away: Path) -> None:
    materials = load_materials(asked([home], [home, away]))
    (dev,) = materials.dev
    assert (dev.name, dev.split, len(dev.queries)) == ("home", "dev", 24)
    assert len(materials.pairs) == 48
    assert set(dev.queries.values()).isdisjoint(materials.pairs.queries)
    assert [(one.name, one.split, len(one.queries)) for one in materials.evaluation] == [
        ("home", "test", 24),
        ("away", "test", 24),
    ]


def test_without_one_a_tenth_is_held_out_and_not_trained_on(
    asked: Callable[..., CompareConfig], without_dev: Path, away: Path
) -> None:
    materials = load_materials(asked([without_dev], [away]))
    (dev,) = materials.dev
    assert (len(materials.pairs), len(dev.queries), dev.split) == (36, 4, "dev")
    assert set(dev.queries).isdisjoint(materials.pairs.query_ids)
    assert set(dev.queries) | set(materials.pairs.query_ids) == {f"plain/q{number}" for number in range(40)}


def test_a_file_of_pairs_is_held_out_from_as_well(
    asked: Callable[..., CompareConfig], tmp_path: Path, away: Path
) -> None:
    rows = [{"query": f"question {number}", "positive": f"passage {number}"} for number in range(30)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    materials = load_materials(asked([path], [away]))
    assert (len(materials.pairs), len(materials.dev[0].queries)) == (27, 3)
    assert set(materials.dev[0].queries.values()).isdisjoint(materials.pairs.queries)
    assert materials.in_domain == []


def test_every_source_has_its_own_dev_collection(
    asked: Callable[..., CompareConfig], home: Path, without_dev: Path
) -> None:
    materials = load_materials(asked([home, without_dev], [home]))
    assert [one.name for one in materials.dev] == ["home", "plain"]
    assert materials.pairs.name == "home+plain"
    assert len(materials.pairs) == 48 + 36


def test_in_domain_is_what_is_trained_on_however_its_path_is_written(
    asked: Callable[..., CompareConfig], home: Path, away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_materials(asked([home], [home, away])).in_domain == ["home"]
    assert load_materials(asked([home], [away])).in_domain == []
    (tmp_path / "link").symlink_to(home)
    assert load_materials(asked([tmp_path / "link"], [home])).in_domain == ["home"]
    monkeypatch.chdir(home.parent)
    assert load_materials(asked(["home"], [f"{home}/../home"])).in_domain == ["home"]
    monkeypatch.setenv("HOME", str(home.parent))
    from_home = load_materials(asked(["~/home"], ["~/home", away]))
    assert from_home.in_domain == ["home"]
    assert len(from_home.dev[0].queries) == 24, "the dev split is found there too"


def test_another_collection_of_the_same_name_is_out_of_domain(
    asked: Callable[..., CompareConfig], home: Path, tmp_path: Path, write_collection: Write
) -> None:
    namesake = write_collection(tmp_path / "home", {"test": 12}, seed=6)
    assert load_materials(asked([home], [namesake])).in_domain == []


def test_two_evaluation_collections_of_one_name_are_refused(
    asked: Callable[..., CompareConfig], home: Path, tmp_path: Path, write_collection: Write
) -> None:
    namesake = write_collection(tmp_path / "other", {"test": 12}, seed=6, settings="name: home\n")
    with pytest.raises(ConfigError, match=r"two evaluation collections are named home.*collection\.yaml"):
        load_materials(asked([home], [home, namesake]))
    with pytest.raises(ConfigError, match="named home"):
        load_materials(asked([home], [home, home]))


def test_samples_are_as_large_as_asked(asked: Callable[..., CompareConfig], home: Path, away: Path) -> None:
    sizes = {
        "max_pairs": 10,
        "max_queries": 5,
        "max_documents": 9,
        "validation_queries": 3,
        "validation_documents": 7,
    }
    materials = load_materials(asked([home], [home, away], **sizes))
    assert len(materials.pairs) == 10
    assert [(len(one.queries), len(one.documents)) for one in materials.evaluation] == [(5, 9), (5, 9)]
    assert [(len(one.queries), len(one.documents)) for one in materials.dev] == [(3, 7)]
    notes = materials.notes()
    assert any(note.startswith("home (test): a sample of 5 of 24 queries") for note in notes)
    assert any(note.startswith("home (dev): a sample of 3 of 24 queries") for note in notes)


def test_fingerprints_tell_every_part_apart(
    asked: Callable[..., CompareConfig], home: Path, away: Path, without_dev: Path
) -> None:
    whole = load_materials(asked([home], [home, away])).fingerprints()
    assert set(whole) == {"pairs home", "dev home", "evaluation home", "evaluation away"}
    assert len(set(whole.values())) == 4
    assert load_materials(asked([home], [home, away])).fingerprints() == whole
    fewer = load_materials(asked([home], [home, away], max_pairs=10)).fingerprints()
    assert {name for name in whole if fewer[name] != whole[name]} == {"pairs home"}


@pytest.mark.parametrize("prompts", [{}, {"query": "ask : ", "document": "answer : "}])
def test_texts_are_all_that_a_run_encodes(
    asked: Callable[..., CompareConfig],
    home: Path,
    tmp_path: Path,
    write_collection: Write,
    prompts: dict[str, str],
) -> None:
    own = write_collection(tmp_path / "own", {"test": 12}, seed=7, settings="prompts:\n  query: 'own : '\n")
    materials = load_materials(asked([home], [home, own]))
    texts = set(materials.texts(prompts))
    query, document = prompts.get("query", ""), prompts.get("document", "")
    assert {query + text for text in materials.pairs.queries} <= texts
    assert {document + text for text in materials.pairs.positives} <= texts
    for one in (*materials.dev, *materials.evaluation):
        before = "own : " if one.name == "own" else query
        assert {before + text for text in one.queries.values()} <= texts
        assert {document + text for text in one.documents.values()} <= texts


def test_texts_hold_the_negatives(asked: Callable[..., CompareConfig], tmp_path: Path, away: Path) -> None:
    rows = [{"query": f"q{i}", "positive": f"p{i}", "negative_1": f"n{i}"} for i in range(20)]
    path = tmp_path / "triplets.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert {f"n{i}" for i in range(20)} <= set(load_materials(asked([path], [away])).texts({}))


def test_a_judgement_without_a_document_is_noted_or_refused(
    asked: Callable[..., CompareConfig], home: Path, tmp_path: Path, write_collection: Write
) -> None:
    broken = write_collection(tmp_path / "broken", {"test": 12}, seed=8)
    with (broken / "qrels" / "test.tsv").open("a", encoding="utf-8") as file:
        file.write("q0\tnowhere\t1\n")
    notes = load_materials(asked([home], [broken])).notes()
    assert [note for note in notes if "nowhere" in note and note.startswith("broken (test): ")]
    with pytest.raises(DataError, match="nowhere"):
        load_materials(asked([home], [broken], strict=True))
