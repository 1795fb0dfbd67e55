"""Environments: what answers a model's turn and says what it was worth.

`interfaces` is what a user implements, `registry` finds it by name, `actor` hosts it in a Ray actor,
`client` is how rollouts talk to it, `grading/` runs verifiers in killable processes. This file
imports nothing, so that a grading process starts without torch and ray.
"""
