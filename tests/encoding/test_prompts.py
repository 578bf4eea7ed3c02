from __future__ import annotations

import pytest

from offsphere.encoding.prompts import Prompts, prompts_in_force


def test_the_datas_own_prompt_comes_before_the_models(encoder):
    encoder.prompts |= {"query": "why : ", "document": None}
    assert prompts_in_force(encoder).texts == {"query": "why : ", "document": ""}
    assert prompts_in_force(encoder, {"document": "the : "}).texts == {"query": "why : ", "document": "the : "}
    assert prompts_in_force(encoder, {"query": ""}).texts == {"query": "", "document": ""}
    assert prompts_in_force(encoder, sides=["query"]).texts == {"query": "why : "}


def test_tokens_are_those_of_the_prompt_alone(encoder):
    """Without the special tokens that a transformer puts around every text."""
    prompts = {"query": "why is the : ", "document": "moon"}
    assert prompts_in_force(encoder, prompts).tokens == {"query": 4, "document": 1}
    assert prompts_in_force(encoder).tokens == {"query": 0, "document": 0}


@pytest.mark.parametrize(
    ("query", "document", "said"),
    [
        (("why : ", 2), ("moon", 1), "query prompt 'why : ' (2 tokens), document prompt 'moon' (1 token)"),
        (("", 0), ("moon", 1), "no query prompt, document prompt 'moon' (1 token)"),
        (("", 0), ("", 0), "no query prompt, no document prompt"),
    ],
)
def test_what_is_said_of_them(query, document, said):
    texts, tokens = ({"query": query[i], "document": document[i]} for i in (0, 1))
    prompts = Prompts(texts, tokens)
    assert str(prompts) == said
    assert bool(prompts) == ("'" in said)


def test_only_what_differs_from_the_models_is_named():
    models = Prompts({"query": "ask : ", "document": ""}, {"query": 2, "document": 0})
    both = Prompts({"query": "", "document": "moon"}, {"query": 0, "document": 1})
    assert both.in_place_of(models) == (
        "its own query prompt '' (0 tokens), in place of the model's 'ask : '; its own document prompt 'moon' (1 token)"
    )
    assert models.in_place_of(models) == ""
