"""Hydra sweeps in which each job has several ranks: the only room that imports Hydra."""
