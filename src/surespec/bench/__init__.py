"""Measuring an endpoint: what is sent, how it is timed, what its counters say, and other tools' result files."""
