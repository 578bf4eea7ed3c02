"""Texts to the vectors that a search engine stores and compares, with numpy, tokenizers and onnxruntime alone.

This file stands beside the graph, the tokenizer and ``embedder.json``, which says how the vectors are made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

BATCH_TEXTS = 64
BATCH_CHARACTERS = 64 * 4096


class Embedder:
    """Vectors of queries and documents whose inner product is the score that the model was trained for.

    Args:
        folder: Holds ``model.onnx``, ``tokenizer.json`` and ``embedder.json``.
        providers: What onnxruntime computes on, such as ``CUDAExecutionProvider``; the CPU when None.
    """

    def __init__(self, folder: str | Path, providers: Sequence[str] | None = None):
        self.settings = json.loads((Path(folder) / "embedder.json").read_text(encoding="utf-8"))
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        graph = str(Path(folder) / "model.onnx")
        self._session = onnxruntime.InferenceSession(graph, providers=list(providers or ["CPUExecutionProvider"]))

    def queries(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(N, n) vectors q / |q|^gamma_q and (N,) lengths |q|, float32, in the order of the texts."""
        return self._embed(texts, "query")

    def documents(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(N, n) vectors d / |d|^gamma_d and (N,) lengths |d|, float32, in the order of the texts."""
        return self._embed(texts, "document")

    def _embed(self, texts: Sequence[str], side: str) -> tuple[np.ndarray, np.ndarray]:
        prompt = self.settings["prompts"][side]
        vectors = np.zeros((len(texts), self.settings["dimension"]), np.float32)
        lengths = np.zeros(len(texts), np.float32)
        for rows in _batches(texts):
            encodings = self._tokenizer.encode_batch([prompt + texts[row] for row in rows])
            # The tokenizer pads to the longest text. A batch without any token still needs a column.
            inputs = {
                "input_ids": np.array([encoding.ids or [0] for encoding in encodings], np.int64),
                "attention_mask": np.array([encoding.attention_mask or [0] for encoding in encodings], np.int64),
            }
            # A text without a visible character has no tokens to attend to, whatever the prompt: a zero vector.
            inputs["attention_mask"][[not texts[row].strip() for row in rows]] = 0
            vectors[rows], lengths[rows] = self._session.run([f"{side}_vector", "norm"], inputs)
        return vectors, lengths


def _batches(texts: Sequence[str]) -> Iterator[list[int]]:
    """The rows of texts of about one length; a batch of long ones has fewer, so that memory stays bounded."""
    batch: list[int] = []
    for row in sorted(range(len(texts)), key=lambda row: len(texts[row])):
        if batch and (len(batch) == BATCH_TEXTS or (len(batch) + 1) * len(texts[row]) > BATCH_CHARACTERS):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
