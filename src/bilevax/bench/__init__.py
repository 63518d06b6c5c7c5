"""Experiments with known answers, run by `bilevax bench`."""
