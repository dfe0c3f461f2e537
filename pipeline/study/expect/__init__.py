"""Recipes as tests: their section `expect`, which training doesn't read, and what meets it."""
