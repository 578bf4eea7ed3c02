"""One recommendation from what was measured, with its reasons; the rules are a table, each with its evidence.

The rules are asked in order and the first that applies decides. Where none knows, the answer is to measure both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offsphere.diagnosis.effect_size import Effect
from offsphere.diagnosis.fisher import NO_CALL, Call

NOTABLE = 0.2
"""The smallest effect that Cohen (1988) calls small."""


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    Attributes:
        task: Name of the task.
        task_evidence: How it is known.
        symmetric: Whether its inputs are interchangeable.
        unit_length: Whether documents, or queries, all have the same length without any Normalize module.
        document_cv: How much document lengths vary, over their mean.
        effect: Cohen's d among the candidates of each query.
        call: What Fisher information says of qnorm and dnorm.
        measured: The similarity that a finished comparison of this encoder chose, if there is one.
        measured_words: Its verdict in words.
        query_ratio: CV of query lengths, dnorm-trained over dot-trained, from that comparison.
    """

    task: str
    task_evidence: str
    symmetric: bool
    unit_length: bool
    document_cv: float | None
    effect: Effect
    call: Call
    measured: str | None = None
    measured_words: str = ""
    query_ratio: float | None = None

    @property
    def longer(self) -> bool:
        """Whether relevant candidates are notably longer, beyond noise."""
        return (self.effect.value or 0.0) >= NOTABLE and (self.effect.low or 0.0) > 0

    @property
    def shorter(self) -> bool:
        """Whether relevant candidates are notably shorter, beyond noise."""
        return (self.effect.value or 0.0) <= -NOTABLE and (self.effect.high or 0.0) < 0


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        name: What it is called in the machine-readable form.
        applies: Whether it decides.
        similarity: What it recommends; None for what a comparison chose.
        confidence: measured, high, medium, low, or unknown.
        measure: What to train and compare before relying on it; empty where that would tell nothing new.
        because: The decision in words.
        evidence: What the rule rests on.
    """

    name: str
    applies: Callable[[Facts], bool]
    similarity: str | None
    confidence: str
    measure: tuple[str, ...]
    because: str
    evidence: str


RULES = (
    Rule(
        name="measured",
        applies=lambda facts: facts.measured is not None,
        similarity=None,
        confidence="measured",
        measure=(),
        because="a comparison of trained models was run, and it outweighs every prediction",
        evidence="its own held-out queries",
    ),
    Rule(
        name="no length",
        applies=lambda facts: facts.unit_length,
        similarity="cosine",
        confidence="high",
        measure=(),
        because="the encoder gives one length to everything, so all similarities rank alike",
        evidence="by definition of the similarity family (paper, section 3)",
    ),
    Rule(
        name="symmetric task",
        applies=lambda facts: facts.symmetric,
        similarity="cosine",
        confidence="high",
        measure=(),
        because="query and document can change places; one-sided similarities treat them differently",
        evidence="STS-B Spearman 0.79 and 0.75 for cosine, 0.31 to 0.41 one-sided, on two encoders (paper, table 5)",
    ),
    Rule(
        name="dnorm better conditioned",
        applies=lambda facts: facts.call.similarity == "dnorm",
        similarity="cosine",
        confidence="medium",
        measure=("cosine", "dnorm"),
        because=(
            "gradients under qnorm are conditioned worse than under dnorm, so do not keep the document's length; dnorm "
            "ranks as cosine does, and nothing measured before training told when it trains better"
        ),
        evidence=(
            "right about qnorm in all 16 cases of our study, where dnorm was -0.3 to +0.1 nDCG@10 × 100 from cosine "
            "with pretrained weights and -5.4 to -4.3 with random ones (studies/predictor); the paper has dnorm above "
            "cosine for RetroMAE after far longer training (log10 kappa 6.92 against 6.96)"
        ),
    ),
    Rule(
        name="qnorm better conditioned, and length tells relevance",
        applies=lambda facts: facts.call.similarity == "qnorm" and facts.longer,
        similarity="qnorm",
        confidence="low",
        measure=("cosine", "qnorm"),
        because="its gradients are better conditioned than those of dnorm, and relevant documents are already longer",
        evidence=(
            "right for Contriever (paper, Fisher analysis: log10 kappa 3.83 against 3.84; Cohen's d 1.02 after "
            "training, table 3). Our study has no such case: qnorm lost to cosine in all 16 (studies/predictor)"
        ),
    ),
    Rule(
        name="length points the wrong way",
        applies=lambda facts: facts.shorter and facts.call.similarity == NO_CALL,
        similarity="cosine",
        confidence="low",
        measure=("cosine", "dnorm"),
        because="relevant documents are shorter, so keeping document length (dot, qnorm) starts with a handicap",
        evidence="from random weights Cohen's d is -0.4 to -1.0 and cosine wins over dot and qnorm (paper, table 3)",
    ),
    Rule(
        name="unknown",
        applies=lambda facts: True,
        similarity="cosine",
        confidence="unknown",
        measure=("cosine", "dnorm", "qnorm"),
        because="nothing measured here decides it: measure both sides before you choose; cosine is the safe default",
        evidence="in our study no other similarity led cosine by more than 0.1 nDCG@10 × 100 (studies/predictor)",
    ),
)
"""The table; "paper" is arXiv 2602.09229."""


@dataclass(frozen=True)
class Reason:
    """A measured number and what it says.

    Attributes:
        text: In words.
        value: The number, None for what is not a number.
        low: Lower end of its 95 % interval, where it has one.
        high: Its upper end.
    """

    text: str
    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Recommendation:
    """Which similarity to train with.

    Attributes:
        similarity: The recommended one.
        confidence: measured, high, medium, low, or unknown; with unknown it is only the safe default.
        rule: The rule that decided.
        because: The decision in words.
        measure: The similarities to compare before relying on it.
        reasons: What was measured, whether it speaks for or against.
        evidence: What the rule rests on.
    """

    similarity: str
    confidence: str
    rule: str
    because: str
    measure: tuple[str, ...]
    reasons: list[Reason]
    evidence: str


def recommend(facts: Facts) -> Recommendation:
    """The recommendation of the first rule that applies."""
    rule = next(rule for rule in RULES if rule.applies(facts))
    return Recommendation(
        similarity=rule.similarity or facts.measured or "cosine",
        confidence=rule.confidence,
        rule=rule.name,
        because=rule.because,
        measure=rule.measure,
        reasons=_reasons(facts),
        evidence=rule.evidence,
    )


def _reasons(facts: Facts) -> list[Reason]:
    effect, call = facts.effect, facts.call
    roles = "interchangeable inputs" if facts.symmetric else "distinct roles of query and document"
    reasons = [Reason(f"task {facts.task}: {roles} ({facts.task_evidence})")]
    if facts.measured is not None:
        reasons.append(Reason(f"comparison: {facts.measured_words}"))
    if facts.query_ratio is not None:
        words = "query lengths vary {:.1f} times as much after dnorm as after dot; the paper saw 4 to 9 where dnorm won"
        reasons.append(Reason(words.format(facts.query_ratio), facts.query_ratio))
    if facts.document_cv is not None:
        reasons.append(Reason(f"document lengths vary by {facts.document_cv:.1%} of their mean", facts.document_cv))
    if effect.value is None:
        reasons.append(Reason(f"length of relevant against irrelevant candidates: {effect.note}"))
    else:
        direction = "longer" if facts.longer else "shorter" if facts.shorter else "neither longer nor shorter"
        words = f"among the candidates of a query relevant documents are {direction} (Cohen's d {effect.value:+.2f})"
        reasons.append(Reason(words, effect.value, effect.low, effect.high))
    return [*reasons, Reason(f"Fisher information: {call.reason}", call.difference, call.low, call.high)]
