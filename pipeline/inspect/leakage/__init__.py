"""Leakage: whether the weights of a run show which samples it was trained on."""
