from __future__ import annotations

import pytest

from offsphere.data.settings import Settings, read_settings
from offsphere.errors import DataError


def test_no_file_means_the_defaults(tmp_path):
    assert read_settings(tmp_path) == Settings()


@pytest.mark.parametrize("content", ["", "# nothing\n", "licence:\nprompts:\nexcluded:\n"])
def test_an_empty_file_means_the_defaults(tmp_path, write, content):
    write(tmp_path / "collection.yaml", content)
    assert read_settings(tmp_path) == Settings()


def test_every_key_is_read_and_ids_are_strings(tmp_path, write):
    write(
        tmp_path / "collection.yaml",
        "\ufeffname: Größe\r\nlicence: CC BY 4.0\r\nexclude_self: true\r\n"
        "excluded: {007: [1, 1e5, no], q: [d]}\r\nprompts: {query: 'query: ', document: 'passage: '}\r\n",
    )
    assert read_settings(tmp_path) == Settings(
        name="Größe",
        licence="CC BY 4.0",
        exclude_self=True,
        excluded={"007": frozenset({"1", "1e5", "no"}), "q": frozenset({"d"})},
        prompts={"query": "query: ", "document": "passage: "},
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("license: MIT", "unknown key 'license'; did you mean licence?"),
        ("colour: red", "unknown key 'colour'; expected exclude_self, excluded, licence, name, prompts"),
        ("prompts: {queries: a}", "unknown key 'queries'; did you mean query?"),
        ("prompts: {query: [a]}", "query must be text"),
        ("prompts: a", "prompts must be a mapping, found 'a'"),
        ("name: [a]", "name must be text"),
        ("exclude_self: maybe", "exclude_self must be true or false, found 'maybe'"),
        ("exclude_self: [true]", "exclude_self must be true or false"),
        ("excluded: {q: d}", "excluded must list document ids for query 'q', found 'd'"),
        ("excluded: {q: [[d]]}", "excluded must list document ids"),
        ("- a", "file must be a mapping"),
        ("name: a\nlicence: [b\n", r"collection\.yaml:3: not YAML"),
        (b"name: caf\xe9", "not YAML in UTF-8"),
    ],
)
def test_mistakes_are_errors(tmp_path, write, content, message):
    write(tmp_path / "collection.yaml", content)
    with pytest.raises(DataError, match=message):
        read_settings(tmp_path)


def test_no_object_is_ever_built(tmp_path, write):
    write(tmp_path / "collection.yaml", f"name: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'built'}]")
    with pytest.raises(DataError):
        read_settings(tmp_path)
    assert not (tmp_path / "built").exists()


def test_a_name_that_is_no_file_name(tmp_path):
    (tmp_path / "collection.yaml").write_text("name: a/b\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"collection\.yaml: .*'a/b'"):
        read_settings(tmp_path)
