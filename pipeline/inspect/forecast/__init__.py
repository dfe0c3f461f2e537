"""Forecast of the time of a step on this machine, before the step is compiled."""
