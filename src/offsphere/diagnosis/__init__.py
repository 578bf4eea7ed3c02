"""What the lengths of embeddings say about a retriever, before and after training.

The names below are functions on arrays. ``diagnosis.diagnose.diagnose`` and ``diagnosis.tune.tune`` do it all, from a
model and a collection.
"""

from __future__ import annotations

from offsphere.diagnosis.effect_size import candidate_effect, cohens_d, collection_effect
from offsphere.diagnosis.fisher import fisher_information
from offsphere.diagnosis.gradients import info_nce_gradients
from offsphere.diagnosis.symmetry import symmetry_warning
from offsphere.diagnosis.variation import coefficient_of_variation, variation_ratios

__all__ = [
    "candidate_effect",
    "coefficient_of_variation",
    "cohens_d",
    "collection_effect",
    "fisher_information",
    "info_nce_gradients",
    "symmetry_warning",
    "variation_ratios",
]
