"""The autopsy of a bad step: the search for the origin of its NaN or infinity."""
