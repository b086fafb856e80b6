"""What a filter does to gradient and noise: from its coefficients, or from gradients that were released already."""
