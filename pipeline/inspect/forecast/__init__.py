"""Forecasts of a step on this machine, before it is compiled."""
