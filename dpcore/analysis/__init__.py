"""What a filter does to gradient and noise: computed from coefficients, or from gradients that were already released."""
