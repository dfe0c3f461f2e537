"""Report of a trained run: its evaluation sample by sample, as one page and as files."""
