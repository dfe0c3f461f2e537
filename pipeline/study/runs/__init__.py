"""All runs of a folder: what they have in common, what sets them apart, what came of it."""
