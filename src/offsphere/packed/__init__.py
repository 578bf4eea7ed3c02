"""A forward pass without padding for the encoders where it is exact, for inference and training on a CPU."""

from offsphere.packed.packing import Packing, is_packed, packed_input

__all__ = ["Packing", "is_packed", "packed_input"]
