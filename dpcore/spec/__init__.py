"""The port: what a backend must do, said once. Backends import this package and nothing else of dpcore's core."""
