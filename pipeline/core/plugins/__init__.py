"""Custom code, which only `--plugin` on the command line loads."""
