"""From a model to a search engine: exact and approximate search, the index, the stores, and the proof of parity."""
