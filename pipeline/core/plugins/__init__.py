"""Code of the user's own: what `--plugin` names on the command line, and nothing else loads."""
