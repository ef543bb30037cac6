"""Where tensors rest: device, host, disk; and what is booked there."""
