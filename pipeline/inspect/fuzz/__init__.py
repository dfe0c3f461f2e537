"""Fuzz: changed samples and changed weights that fool a trained network."""
