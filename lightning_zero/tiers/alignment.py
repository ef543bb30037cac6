"""Where tensors that share an array begin: at multiples of `ALIGNMENT_BYTES`."""

ALIGNMENT_BYTES = 64  # a cache line; torch's own allocator aligns tensors on the host to it


def round_up(number: int, multiple: int) -> int:
    """Rounds `number` up to a multiple of `multiple`."""
    return -(-number // multiple) * multiple
