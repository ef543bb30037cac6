"""A training step: what is gathered, reduced and stepped when."""
