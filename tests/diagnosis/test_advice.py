from __future__ import annotations

from dataclasses import replace

import pytest

from offsphere.diagnosis.advice import RULES, Facts, recommend
from offsphere.diagnosis.effect_size import Effect
from offsphere.diagnosis.fisher import NO_CALL, Call
from offsphere.similarity import FIXED


def effect(value: float | None, margin: float = 0.1) -> Effect:
    if value is None:
        return Effect(None, None, None, None, 3, 3, 9, "not enough data: 3 queries, at least 20 needed")
    return Effect(value, value, value - margin, value + margin, 100, 100, 900)


def call(similarity: str) -> Call:
    difference = {"dnorm": 0.5, "qnorm": -0.5, NO_CALL: 0.0}[similarity]
    return Call(similarity, difference, difference - 0.2, difference + 0.2, f"{similarity}: because")


FACTS = Facts("retrieval", "declared", False, False, 0.2, effect(0.0), call(NO_CALL))


@pytest.mark.parametrize(
    ("changed", "similarity", "confidence", "rule"),
    [
        ({}, "cosine", "unknown", "unknown"),
        ({"effect": effect(None)}, "cosine", "unknown", "unknown"),
        ({"effect": effect(0.6)}, "cosine", "unknown", "unknown"),  # a signal alone does not say what to train with
        ({"call": call("dnorm")}, "cosine", "medium", "dnorm better conditioned"),
        ({"call": call("dnorm"), "effect": effect(-0.6)}, "cosine", "medium", "dnorm better conditioned"),
        ({"call": call("qnorm")}, "cosine", "unknown", "unknown"),
        ({"call": call("qnorm"), "effect": effect(0.19)}, "cosine", "unknown", "unknown"),
        ({"call": call("qnorm"), "effect": effect(0.5, margin=0.6)}, "cosine", "unknown", "unknown"),
        ({"call": call("qnorm"), "effect": effect(-0.5)}, "cosine", "unknown", "unknown"),  # the two contradict
        (
            {"call": call("qnorm"), "effect": effect(0.5)},
            "qnorm",
            "low",
            "qnorm better conditioned, and length tells relevance",
        ),
        ({"effect": effect(-0.5)}, "cosine", "low", "length points the wrong way"),
        ({"symmetric": True, "task": "sts", "call": call("dnorm")}, "cosine", "high", "symmetric task"),
        ({"unit_length": True, "call": call("dnorm")}, "cosine", "high", "no length"),
        ({"measured": "qnorm", "symmetric": True, "unit_length": True}, "qnorm", "measured", "measured"),
    ],
)
def test_the_first_rule_that_applies_decides(changed, similarity, confidence, rule):
    found = recommend(replace(FACTS, **changed))
    assert (found.similarity, found.confidence, found.rule) == (similarity, confidence, rule)


def test_what_is_not_known_is_to_be_measured():
    found = recommend(FACTS)
    assert "measure both" in found.because
    assert set(found.measure) == {"cosine", "dnorm", "qnorm"}


def test_every_rule_cites_its_evidence_and_the_last_one_always_applies():
    assert all(rule.evidence and rule.because for rule in RULES)
    assert all(rule.similarity in FIXED for rule in RULES if rule.name != "measured")
    assert all(rule.similarity in rule.measure for rule in RULES if rule.measure)
    assert RULES[-1].name == "unknown"
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_every_reason_is_a_measured_number_or_says_why_there_is_none():
    facts = replace(FACTS, effect=effect(0.5), measured="dnorm", measured_words="dnorm; +2.1", query_ratio=4.2)
    reasons = {reason.text: reason for reason in recommend(facts).reasons}
    assert any("dnorm; +2.1" in text for text in reasons)
    numbers = [(one.value, one.low, one.high) for one in reasons.values() if one.value is not None]
    assert (4.2, None, None) in numbers
    assert (0.2, None, None) in numbers
    assert (0.5, 0.4, 0.6) in numbers
    assert (0.0, -0.2, 0.2) in numbers
    missing = recommend(replace(FACTS, effect=effect(None), document_cv=None)).reasons
    assert any("not enough data" in reason.text and reason.value is None for reason in missing)


@pytest.mark.parametrize(("value", "word"), [(0.5, "longer"), (-0.5, "shorter"), (0.1, "neither"), (0.5, "neither")])
def test_the_direction_is_only_named_beyond_noise(value, word):
    margin = 0.8 if word == "neither" else 0.1
    texts = [reason.text for reason in recommend(replace(FACTS, effect=effect(value, margin))).reasons]
    assert any(f"relevant documents are {word}" in text for text in texts)
