"""Several processes of a run: how they start, join each other and end."""
