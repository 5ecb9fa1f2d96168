"""Gin files: models/ (sizes), runs/ (what is done with them), examples/ (complete runs)."""
