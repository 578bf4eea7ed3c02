"""Relevance judgements: three columns as BEIR writes them, or four as TREC does."""

from __future__ import annotations

import re
from pathlib import Path

from offsphere.data.lines import read_lines
from offsphere.errors import DataError

EXPECTED = "expected 'query-id<TAB>corpus-id<TAB>score', or the TREC columns 'query-id 0 document-id grade'"
_HEADERS = {"queryid", "qid", "query"}
_INTEGER = re.compile(r"-?[0-9]+")


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Query id to {document id: grade}, in the order of the file. Columns are split at tabs, or else at spaces.

    A first line that starts with query-id, query_id, qid or query is the header; blank lines are skipped.

    Raises:
        DataError: If a line has another number of columns, a grade that is not a whole number, or contradicts an
            earlier line.
    """
    qrels: dict[str, dict[str, int]] = {}
    for number, line in read_lines(path):
        columns = [column.strip() for column in line.split("\t")] if "\t" in line else line.split()
        if not any(columns) or (number == 1 and re.sub(r"[\W_]", "", columns[0]).lower() in _HEADERS):
            continue
        query, document, grade = _judgement(columns, path, number)
        earlier = qrels.setdefault(query, {}).setdefault(document, grade)
        if earlier != grade:
            raise DataError(
                f"query {query!r} and document {document!r} are judged {grade} here and {earlier} above; "
                f"expected one grade for each pair",
                path,
                number,
            )
    return qrels


def _judgement(columns: list[str], path: Path, number: int) -> tuple[str, str, int]:
    if len(columns) not in (3, 4):
        raise DataError(f"found {len(columns)} columns, {EXPECTED}", path, number)
    query, document, grade = columns[0], columns[-2], columns[-1]
    if not query or not document:
        raise DataError(f"found an empty id, {EXPECTED}", path, number)
    if not _INTEGER.fullmatch(grade):
        raise DataError(f"the grade {grade!r} is not a whole number, {EXPECTED}", path, number)
    return query, document, int(grade)
