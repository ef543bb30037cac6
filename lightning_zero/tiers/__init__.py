"""The tiers in which tensors are kept (device, host, disk), and the ledger of their bytes."""
