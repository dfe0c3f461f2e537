"""The pipeline as a library: a trainer, and batches of a recipe's data."""
