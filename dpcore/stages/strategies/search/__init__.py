"""Strategies at the least error there is, and the proof of how near they are to it."""
