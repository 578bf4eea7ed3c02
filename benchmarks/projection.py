"""Time, memory, storage and cost of many documents, from rates that were measured.

Measured: texts a second that one processor encodes (the figures of ``encode.py --threads 1 --json``), seconds and bytes
an index takes to write and milliseconds of an exact query (those of ``growth.py --json``, at the largest size that it
measured), and documents a second that one process reads, checks and hashes (here). The rest is arithmetic: every part
costs so much a document, so a total is a product, and what does not grow with the documents is left out. Prints tables
in Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from offsphere.encoding.texts import Texts

DATA = Path(__file__).parents[1] / "datasets" / "medquad"
IDS_AT_A_TIME = 100_000


def read_all() -> tuple[float, float]:
    """Documents a second that are read, checked and hashed, and bytes a document of the check for repeated ids."""
    texts = Texts(DATA, "document")
    began = time.perf_counter()
    count = texts.plan(4096).count
    rate = count / (time.perf_counter() - began)
    ids = {f"document{number:012d}" for number in range(IDS_AT_A_TIME)}
    return rate, (sys.getsizeof(ids) + sum(map(sys.getsizeof, ids))) / len(ids)


def rates(encode: dict[str, Any], growth: dict[str, Any]) -> dict[str, float]:
    """What was measured, each for one document or one second."""
    if encode["threads"] != 1:
        raise SystemExit(f"give figures of encode.py --threads 1; these are of {encode['threads']}")
    largest = max(growth["measured"], key=lambda row: row["documents"])
    documents, read = largest["documents"], read_all()
    return {
        "float32, texts a second and processor": encode["texts_per_second_passages_ours"],
        "int8, texts a second and processor": encode.get("texts_per_second_passages_int8", float("nan")),
        "read and hash, documents a second": read[0],
        "check of ids, bytes a document": read[1],
        "write an index, documents a second": documents / largest["build"]["seconds"],
        "index on disk, bytes a document": largest["build"]["disk"] / documents,
        "one exact query in memory, documents a second": documents / largest["memory"]["one"],
        "one exact query from disk, documents a second": documents / largest["disk"]["one"],
        "documents of the largest index measured": documents,
        "dimension": growth["dimension"],
    }


def projected(rate: dict[str, float], count: int, processors: int, price: float) -> dict[str, str]:
    """The arithmetic, for one number of documents."""
    encoding = count / rate["float32, texts a second and processor"]
    reading = 2 * count / rate["read and hash, documents a second"]
    vectors = 4 * rate["dimension"] * count
    return {
        "encode, processor hours": f"{encoding / 3600:,.0f}",
        f"encode on {processors:,} processors, hours": f"{encoding / 3600 / processors:,.1f}",
        f"encode, cost at {price:g} a processor hour": f"{encoding / 3600 * price:,.0f}",
        "the same, a million documents": f"{encoding / 3600 * price / count * 1e6:,.2f}",
        "read twice and hash, one process, hours": f"{reading / 3600:,.1f}",
        "memory for the check of ids, GB": f"{count * rate['check of ids, bytes a document'] / 1e9:,.1f}",
        "embeddings on disk, GB": f"{vectors / 1e9:,.0f}",
        "index on disk, GB": f"{count * rate['index on disk, bytes a document'] / 1e9:,.0f}",
        "write the index, one process, hours": f"{count / rate['write an index, documents a second'] / 3600:,.1f}",
        "memory of exact search in memory, GB": f"{(vectors + 40 * count) / 1e9:,.0f}",
        "one exact query in memory, s": f"{count / rate['one exact query in memory, documents a second']:,.1f}",
        "one exact query from disk, s": f"{count / rate['one exact query from disk, documents a second']:,.0f}",
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encode", type=Path, required=True, help="figures of encode.py --threads 1 --json")
    parser.add_argument("--growth", type=Path, required=True, help="figures of growth.py --json")
    parser.add_argument("--documents", type=int, nargs="+", default=[10_000_000, 1_000_000_000])
    parser.add_argument("--processors", type=int, default=100, help="that encode at the same time")
    parser.add_argument("--price", type=float, default=0.04, help="of a processor hour, in any currency")
    options = parser.parse_args(arguments)

    rate = rates(*(json.loads(file.read_text(encoding="utf-8")) for file in (options.encode, options.growth)))
    print("| measured | |\n| --- | ---: |")
    for name, value in rate.items():
        print(f"| {name} | {value:,.0f} |")
    columns = [projected(rate, count, options.processors, options.price) for count in options.documents]
    print(f"\n| computed | {' | '.join(f'{count:,}' for count in options.documents)} |")
    print(f"| --- |{' ---: |' * len(columns)}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(column[name] for column in columns)} |")


if __name__ == "__main__":
    main()
