"""Autopsy of a non-finite step: the search for the origin of its NaN or infinity."""
