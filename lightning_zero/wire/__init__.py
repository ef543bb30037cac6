"""Messages between ranks: collectives, and small agreements that are no collectives."""
