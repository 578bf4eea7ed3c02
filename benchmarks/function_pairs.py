"""Pairs of very uneven length that every machine has: Python's own functions and what their docstrings say of them."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
from pathlib import Path

LIMIT = 4000
"""Characters kept of a function: far more than any encoder here reads."""
UNTOLD = {"test", "tests", "idlelib", "lib2to3", "site-packages"}


def function_pairs(n: int) -> tuple[list[str], list[str]]:
    """Queries (first sentences of docstrings) and documents (the functions without them), n of each.

    All are different. They come from the standard library in the order of a fixed shuffle, so that a smaller n gives
    the first ones of a larger n on the same version of Python.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        if UNTOLD.isdisjoint(path.relative_to(root).parts):
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (told := ast.get_docstring(node)):
                    query = inspect.cleandoc(told).split("\n\n")[0].replace("\n", " ")
                    body = [*node.body[1:], *([] if node.body[1:] else [ast.Pass()])]
                    node.body = body
                    found.setdefault(query, ast.unparse(node)[:LIMIT])
    documents = {document: query for query, document in found.items()}
    pairs = sorted(((query, document) for document, query in documents.items()), key=lambda pair: _shuffled(pair[0]))
    if len(pairs) < n:
        raise SystemExit(f"the standard library in {root} has {len(pairs)} functions with a docstring, {n} are wanted")
    return [query for query, _ in pairs[:n]], [document for _, document in pairs[:n]]


def _shuffled(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
