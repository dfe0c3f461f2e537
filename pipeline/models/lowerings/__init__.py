"""Convolutions, dense products and max pooling by several exact formulas, and the choice of one."""
