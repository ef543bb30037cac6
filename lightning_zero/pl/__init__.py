"""Lightning's strategy, precision plugins, callbacks and readers: the only room that imports `lightning`."""
