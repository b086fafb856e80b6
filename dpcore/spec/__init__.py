"""The port: the contract of a backend. Backends import this package and nothing else of dpcore's core."""
