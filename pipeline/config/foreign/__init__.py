"""Recipes from the settings of other trainers."""
