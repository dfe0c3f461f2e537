"""Training on several devices: how a recipe asks for it, and what the devices have in common."""
