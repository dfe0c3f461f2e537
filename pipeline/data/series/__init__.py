"""Series of numbers: files, times, windows and their scale."""
