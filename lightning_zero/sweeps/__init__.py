"""Hydra sweeps in which each job has several ranks. Only this layer imports Hydra."""
