"""THOR: gradients preconditioned by Kronecker-factored curvature, refreshed at intervals."""
