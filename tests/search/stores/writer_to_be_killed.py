"""Writes, replaces and deletes at the target in its argument, says when each batch is stored, waits to be killed."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np

from offsphere.search.stores import Record, Stamp, open_store
from offsphere.similarity import Similarity

BATCHES = 8
SIZE = 50
DIMENSION = 32
GONE = "gone"
STAMP = Stamp(Similarity.parse("dot"), "fingerprint")


def batch(number: int) -> list[Record]:
    vectors = np.random.default_rng(number).normal(size=(SIZE, DIMENSION)).astype(np.float32)
    return [Record(f"{number}/{row}", vector, 1.0, text=f"text {row}") for row, vector in enumerate(vectors)]


if __name__ == "__main__":
    store = open_store(sys.argv[1])
    store.create(DIMENSION, STAMP)
    store.write(
        [replace(batch(0)[0], text="old", vector=np.zeros(DIMENSION, np.float32)), replace(batch(1)[0], id=GONE)]
    )
    store.delete([GONE])
    for number in range(BATCHES):
        store.write(batch(number))
        print(number, flush=True)  # noqa: T201
    time.sleep(3600)
