"""Dumps: the tensors of every layer in one step, computed by a second program on a saved state."""
