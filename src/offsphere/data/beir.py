"""Collections in BEIR layout: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv, each plain or gzipped.

The layout: https://github.com/beir-cellar/beir/wiki/Load-your-custom-dataset. An optional ``collection.yaml`` adds
exclude_self, excluded, prompts, licence and name.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from offsphere.data.collection import Collection
from offsphere.data.documents import CORPUS, LAYOUT, QUERIES, find_file, parse_queries, read_documents, required_file
from offsphere.data.qrels import read_qrels
from offsphere.data.settings import FILE as SETTINGS_FILE
from offsphere.data.settings import Settings, read_settings
from offsphere.errors import DataError

Qrels = dict[str, dict[str, int]]


def load_collection(source: str | Path, split: str = "test", *, strict: bool = False) -> Collection:
    """The documents of a folder in BEIR layout or of a benchmark, and the queries and judgements of one split.

    Judgements of queries or documents that do not exist are left out, and so are queries without a positive
    judgement; the notes say how many. A perfect ranking therefore always scores 1.

    Args:
        source: The folder, or the name of a benchmark (see ``data.benchmarks``) where there is no such folder.
        split: The name of a file in its ``qrels`` folder, without ``.tsv``; ``test`` is whatever a benchmark is
            published on.
        strict: Whether a judgement of something that does not exist is an error.

    Raises:
        DataError: If a file is missing or malformed, an id occurs twice, or no judgement matches any text.
    """
    from offsphere.data.benchmarks import find_benchmark, load_benchmark, suggestion

    if benchmark := find_benchmark(source):
        return load_benchmark(benchmark, split, strict=strict)
    folder = Path(source).expanduser()
    if not folder.exists() and (hint := suggestion(source)):
        raise DataError(f"neither a folder here nor a benchmark; {hint}", folder)
    qrels_file = _qrels_file(folder, split)
    settings = read_settings(folder)
    documents = {document.id: document.passage for document in read_documents(folder)}
    texts = {query.id: query.text for query in parse_queries(required_file(folder, QUERIES))}
    judgements = read_qrels(qrels_file)
    unknown = _unknown_exclusions(settings.excluded, texts, folder / SETTINGS_FILE, strict)
    name = settings.name or folder.resolve().name
    collection = assemble(name, split, settings, documents, texts, judgements, qrels_file, strict=strict)
    return replace(collection, path=folder, notes=(*unknown, *collection.notes))


def assemble(
    name: str,
    split: str,
    settings: Settings,
    documents: dict[str, str],
    texts: dict[str, str],
    judgements: Qrels,
    where: Path | str,
    *,
    strict: bool = False,
) -> Collection:
    """The collection of texts and judgements from any source, checked as ``load_collection`` says.

    Args:
        name: What results call it.
        split: Which queries these are.
        settings: What the collection declares.
        documents: Document id to passage.
        texts: Query id to text, also of queries that no one judged.
        judgements: Query id to document id to grade.
        where: What errors name.
        strict: Whether a judgement of something that does not exist is an error.

    Raises:
        DataError: If no judgement matches any text.
    """
    judged = (document for grades in judgements.values() for document in grades)
    notes = [
        *_dangling("queries", judgements, texts, where, strict),
        *_dangling("documents", judged, documents, where, strict),
    ]
    known = _split_by(judgements, texts, lambda document: document in documents)
    qrels = {query: grades for query, grades in known.items() if any(grade > 0 for grade in grades.values())}
    if not qrels:
        raise DataError("no query has a positive judgement of a document in the corpus", where)
    if len(qrels) < len(known):
        notes.append(f"{_counted(len(known) - len(qrels), 'query', 'queries')} without a positive judgement left out")
    queries = {query: texts[query] for query in qrels}
    notes += _empty(queries, "query", "queries") + _empty(documents, "document", "documents")
    missing = _split_by(judgements, texts, lambda document: document not in documents)
    return Collection(
        name=name,
        split=split,
        documents=documents,
        queries=queries,
        qrels=qrels,
        excluded={query: ids for query, ids in settings.excluded.items() if query in queries},
        exclude_self=settings.exclude_self,
        prompts=settings.prompts,
        licence=settings.licence,
        notes=tuple(notes),
        missing={query: grades for query, grades in missing.items() if grades},
    )


def available_splits(source: str | Path) -> list[str]:
    """The sorted names of the splits that a collection folder judges."""
    files = (Path(source).expanduser() / "qrels").glob("*.tsv*")
    return sorted({file.name.removesuffix(".gz").removesuffix(".tsv") for file in files if _is_qrels(file)})


def is_collection(folder: Path) -> bool:
    """Whether a folder has the corpus of a collection."""
    return find_file(folder, CORPUS) is not None


def _is_qrels(file: Path) -> bool:
    return file.name.endswith((".tsv", ".tsv.gz")) and not file.name.startswith(".")


def _qrels_file(folder: Path, split: str) -> Path:
    required_file(folder, CORPUS)
    splits = available_splits(folder)
    if not splits:
        raise DataError(f"no judgements in {folder / 'qrels'}; {LAYOUT}", folder)
    if split not in splits:
        raise DataError(f"no split {split!r}; this collection has {', '.join(splits)}", folder)
    return required_file(folder, f"qrels/{split}.tsv")


def _dangling(kind: str, judged: Iterable[str], texts: dict[str, str], where: Path | str, strict: bool) -> list[str]:
    """A note on judged ids without a text; an error where none has one, or where strict."""
    ids = list(judged)
    missing = [identifier for identifier in ids if identifier not in texts]
    if not missing:
        return []
    if len(missing) == len(ids):
        raise DataError(
            f"none of the {len(set(ids))} judged {kind} exists: the judgements name {ids[0]!r}, "
            f"the {kind} have ids such as {next(iter(texts))!r}{_unicode_hint(ids, texts)}",
            where,
        )
    what = "queries that are not in queries.jsonl" if kind == "queries" else "documents that are not in the corpus"
    subject = "judged ids name" if kind == "queries" else "judgements name"
    found = f"{len(missing)} {subject} {what} ({_examples(missing)})"
    if strict:
        raise DataError(f"{found}; add them, or load without strict to leave these judgements out", where)
    return [f"{found}; left out"]


def _unicode_hint(ids: list[str], texts: dict[str, str]) -> str:
    composed = {unicodedata.normalize("NFC", identifier) for identifier in texts}
    if any(unicodedata.normalize("NFC", identifier) in composed for identifier in ids):
        return "; they would match in one Unicode form: write both files in NFC"
    return ""


def _unknown_exclusions(excluded: Iterable[str], texts: dict[str, str], path: Path, strict: bool) -> list[str]:
    unknown = [query for query in excluded if query not in texts]
    if not unknown:
        return []
    found = f"excluded names {_counted(len(unknown), 'unknown query', 'unknown queries')} ({_examples(unknown)})"
    if strict:
        raise DataError(found, path)
    return [found]


def _split_by(judgements: Qrels, texts: dict[str, str], wanted: Callable[[str], bool]) -> Qrels:
    return {
        query: {document: grade for document, grade in grades.items() if wanted(document)}
        for query, grades in judgements.items()
        if query in texts
    }


def _empty(texts: dict[str, str], one: str, many: str) -> list[str]:
    number = sum(not text for text in texts.values())
    return [f"{_counted(number, one, many)} without text"] if number else []


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _examples(ids: list[str]) -> str:
    distinct = list(dict.fromkeys(ids))
    return ", ".join(distinct[:3]) + (", ..." if len(distinct) > 3 else "")
