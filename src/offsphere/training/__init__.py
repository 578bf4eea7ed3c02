"""Training: the plan of a run, one variant at a time on sentence-transformers' trainer, and the comparison of all."""
