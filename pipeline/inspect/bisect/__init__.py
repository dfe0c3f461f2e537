"""Bisect: the smallest set of keys, or the rows, by which two runs differ."""
