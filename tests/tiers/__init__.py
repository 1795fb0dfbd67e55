"""Tiers of tests: which tests a command runs, by the seconds that each took and by what a change can reach."""
