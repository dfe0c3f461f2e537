"""Without: the run as if samples weighed nothing."""
