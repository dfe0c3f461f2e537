"""Several exact ways to compute a convolution and its gradients, and which of them to take."""
