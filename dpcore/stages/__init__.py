"""The five stages of a method, each in a package of its own: query, clip, noise, filter, update."""
