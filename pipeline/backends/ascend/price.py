"""`pricing.py` under its former name, for whoever still imports it from here."""

from pipeline.backends.ascend.pricing import *  # noqa: F403
