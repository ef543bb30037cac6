"""What user code touches in place of tensors whose values are elsewhere."""
