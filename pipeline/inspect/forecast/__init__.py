"""Forecasts of a step on the machine at hand, before it is compiled."""
