"""The data plane: from a client's request to the engine that answers it."""
