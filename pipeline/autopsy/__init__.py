"""The autopsy of a bad step: where in it what is not finite came from."""
