"""Destinations of embeddings: one file a database, all with the methods of ``store.Store``."""
