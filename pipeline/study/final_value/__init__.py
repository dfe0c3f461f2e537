"""The final value of a metric while a run trains, and a pruner that uses it."""
