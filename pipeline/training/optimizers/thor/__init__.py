"""THOR: gradients preconditioned by Kronecker-factored curvature, refreshed now and then."""
