"""Which extra of the distribution brings a package that is not there: one table for every sentence that says so."""

# Package, as it is installed: the extra that brings it. The names are those of pyproject.toml; a test compares them.
EXTRAS = {
    "matplotlib": "plots", "pillow": "images", "pyarrow": "texts", "safetensors": "torch", "scikit-learn": "sklearn",
    "tensorboard": "tensorboard", "torch": "torch", "triton": "triton",
}  # fmt: skip


def needs(feature: str, package: str) -> str:
    """Return the sentence for a `feature` ("a picture") that is not available, since `package` is not installed."""
    distribution = f"'dpcore[{EXTRAS[package]}]'" if package in EXTRAS else package
    return f"{feature} needs {package}; install it with: pip install {distribution}"
