"""An emulated Ascend 910: XLA computes the numbers, a model of the device computes the time.

    from pipeline.backends.ascend import price

What flows: a function and its shapes -> `Graph` (graph.py) -> `TaskGraph` (lowering) -> one
`TaskTime` per task (cost.py) -> `Timeline` under a launch mode (schedule.py) -> `Report`.
"""
