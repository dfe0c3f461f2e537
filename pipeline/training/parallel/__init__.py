"""Training on several devices: its settings, the placement of arrays, and sums over devices."""
