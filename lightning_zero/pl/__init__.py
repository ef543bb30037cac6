"""Lightning's strategy, precision plugins, callbacks and readers: the only layer that imports `lightning`."""
