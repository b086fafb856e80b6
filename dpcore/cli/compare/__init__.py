"""``dpcore compare`` and ``dpcore demo``: several methods at one guarantee."""
