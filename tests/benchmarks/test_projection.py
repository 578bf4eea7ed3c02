from __future__ import annotations

import json
from importlib import util
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "projection.py"


def test_totals_are_products_of_the_rates(tmp_path, capsys):
    specification = util.spec_from_file_location("benchmark_projection", BENCHMARK)
    benchmark = util.module_from_spec(specification)
    specification.loader.exec_module(benchmark)
    encode = {"threads": 1, "texts_per_second_passages_ours": 50.0, "texts_per_second_passages_int8": 75.0}
    rows = [
        {"documents": count, "build": {"seconds": count / 2e4, "disk": count * 4e3}, "memory": {"one": count / 4e6},
         "disk": {"one": count / 2e5}}
        for count in (1000, 30_000)
    ]  # fmt: skip
    (tmp_path / "encode.json").write_text(json.dumps(encode))
    (tmp_path / "growth.json").write_text(json.dumps({"measured": rows, "dimension": 384}))
    files = ["--encode", str(tmp_path / "encode.json"), "--growth", str(tmp_path / "growth.json")]
    benchmark.main([*files, "--documents", "1000000000", "--price", "0.05", "--processors", "100"])
    printed = capsys.readouterr().out
    for line in (
        "| documents of the largest index measured | 30,000 |",
        "| encode, processor hours | 5,556 |",
        "| encode on 100 processors, hours | 55.6 |",
        "| encode, cost at 0.05 a processor hour | 278 |",
        "| the same, a million documents | 0.28 |",
        "| embeddings on disk, GB | 1,536 |",
        "| index on disk, GB | 4,000 |",
        "| write the index, one process, hours | 13.9 |",
        "| memory of exact search in memory, GB | 1,576 |",
        "| one exact query in memory, s | 250.0 |",
        "| one exact query from disk, s | 5,000 |",
    ):
        assert line in printed
    encode["threads"] = 2
    (tmp_path / "encode.json").write_text(json.dumps(encode))
    with pytest.raises(SystemExit, match="--threads 1"):
        benchmark.main(files)
