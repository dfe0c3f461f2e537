"""Receipts: what was trained, as a chain of digests that another machine can check."""
