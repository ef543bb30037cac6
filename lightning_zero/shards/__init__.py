"""Flat arrays of parameters, gradients and optimizer state, divided over ranks."""
