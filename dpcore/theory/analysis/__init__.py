"""The effect of a filter on gradient and noise, from its coefficients or from released gradients."""
