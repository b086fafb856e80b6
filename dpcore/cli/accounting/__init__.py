"""The commands that account: epsilon, delta, calibrate, curve, ledger."""
