"""The commands that report: statement, verify, inspect, audit."""
