"""All runs of a folder: the keys that they share, the keys that differ, and their results."""
