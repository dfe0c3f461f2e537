"""Components of kind "device". Their modules don't import jax at the top."""
