"""Tensors whose values are elsewhere, as user code touches them: parameters, gradients, state, lazy tensors."""
