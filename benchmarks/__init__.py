"""Measurements: named cases, paired timing, and one CSV row a figure in results/."""
