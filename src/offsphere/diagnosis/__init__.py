"""What the lengths of embeddings say about a retriever, before and after training."""

from __future__ import annotations

from offsphere.diagnosis.effect_size import cohens_d
from offsphere.diagnosis.variation import coefficient_of_variation

__all__ = ["coefficient_of_variation", "cohens_d"]
