"""Reward answers that are programs: find programs in responses, run them in a sandbox, and grade them with tests."""
