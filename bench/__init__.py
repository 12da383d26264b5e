"""Measurements, and the pictures they are made with."""
