"""``dpcore train``: settings, the run and its folder."""
