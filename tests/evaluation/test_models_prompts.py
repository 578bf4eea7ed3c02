"""What prompts and limits of length do in an evaluation, and that it says them."""

from __future__ import annotations

import json

from offsphere.encoders import model_fingerprint, open_encoder
from offsphere.evaluation.models import evaluate_models


def test_prompts_and_limits_reach_the_encoder(static, save, make, evaluated, values):
    data, source = [str(make("one"))], str(save(static))
    plain = values(evaluated(source, data, ["dot"]))
    assert values(evaluated(source, data, ["dot"], max_length=2)) != plain
    assert values(evaluated(source, data, ["dot"], prompts={"document": "iron rust star "})) != plain
    assert values(evaluated(source, data, ["dot"], max_length=100, prompts={})) == plain


def test_a_limit_changes_what_identifies_the_embeddings(encoder, save):
    source = str(save(encoder))
    limits = {model_fingerprint(open_encoder(source, max_length=limit)) for limit in (None, 3, 4)}
    assert len(limits) == 3


def test_the_prompts_in_force_are_told(static, save, make, evaluated, listener):
    """Row 92: once a model, and once more where data has its own; not a word where there is none."""
    plain, own, same = (
        make("plain"),
        make("own", 1, "prompts: {query: 'why : '}\n"),
        make("same", 2, "prompts: {query: 'query : '}\n"),
    )
    data = [str(one) for one in (plain, own, same)]
    without, told = str(save(static, "without")), listener()
    evaluated(without, [str(plain)], progress=told)
    assert told.lines == []
    evaluated(without, [str(own)], progress=told)
    assert told.lines == ["own: its own query prompt 'why : ' (2 tokens)"]
    static.prompts |= {"query": "query : "}
    source, told = str(save(static)), listener()
    evaluated(source, data, progress=told)
    assert told.lines == [
        f"{source}: query prompt 'query : ' (2 tokens), no document prompt",
        "own: its own query prompt 'why : ' (2 tokens), in place of the model's 'query : '",
    ]
    told = listener()
    evaluated(source, data, prompts={"query": "the : ", "document": "passage : "}, progress=told)
    assert told.lines == [f"{source}: query prompt 'the : ' (2 tokens), document prompt 'passage : ' (2 tokens)"]


def test_results_say_the_prompt_and_its_tokens(static, transformer, save, make, tmp_path):
    """Row 93: of each side, data set and model; what a prompt counts depends on the tokenizer."""
    static.prompts |= {"query": "query : "}
    one, two = str(save(static, "static")), str(save(transformer, "transformer"))
    own = make("own", settings="prompts: {query: 'why moonlight : '}\n")
    pairs = tmp_path / "pairs" / "test.jsonl"
    pairs.parent.mkdir()
    rows = [{"sentence1": "iron rust", "sentence2": text, "score": i} for i, text in enumerate(("sea", "moon rust"))]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data, out = [str(make("plain", 1)), str(own), str(pairs)], tmp_path / "out"

    def recorded():
        evaluate_models([one, two], data, ["cosine"], out=out)
        described = json.loads((out / "environment.json").read_text(encoding="utf-8"))["datasets"]
        return {name: of["models"] for name, of in described.items()}

    def force(query: str, tokens: int):
        return {"prompts": {"query": query, "document": ""}, "prompt_tokens": {"query": tokens, "document": 0}}

    models_own = {one: force("query : ", 2), two: force("", 0)}
    expected = {
        "plain": models_own,
        "own": {one: force("why moonlight : ", 3), two: force("why moonlight : ", 8)},
        "pairs": models_own,
    }
    assert recorded() == expected
    assert recorded() == expected  # also where all of it was finished before


def test_a_benchmark_by_name_and_its_task_prompt(static, save, make, tmp_path, monkeypatch, evaluated, values):
    monkeypatch.setenv("OFFSPHERE_BENCHMARKS", str(tmp_path / "home"))
    (tmp_path / "home" / "bright").mkdir(parents=True)
    make("biology").rename(tmp_path / "home" / "bright" / "biology")
    source, out = str(save(static)), tmp_path / "out"
    plain, prompted = (
        evaluated(source, ["bright/biology"], ["dot"], task_prompts=asked, out=out) for asked in (False, True)
    )
    assert {row.dataset for row in plain} == {"bright-biology"} and values(plain) != values(prompted)
    described = json.loads((out / "environment.json").read_text(encoding="utf-8"))
    assert described["datasets"]["bright-biology"]["prompts"]["query"].startswith("Represent this biology post")
    assert described["command"] and described["versions"]["offsphere"]
    assert described["models"][source]["similarities"] == {"dot": {"gamma_q": 0.0, "gamma_d": 0.0}}
    own = evaluated(source, ["bright/biology"], ["dot"], task_prompts=True, prompts={"query": "query: "})
    assert values(own) not in (values(plain), values(prompted))  # a prompt that was given comes first
