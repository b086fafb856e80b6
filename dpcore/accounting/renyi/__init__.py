"""Renyi differential privacy of the events."""
