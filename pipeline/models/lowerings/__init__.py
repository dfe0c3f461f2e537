"""Several formulas for convolutions, dense products and max pooling, and the choice of the
fastest."""
