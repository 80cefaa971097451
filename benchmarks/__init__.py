"""Measurements, each of which one command runs; README.md lists them."""
