"""Environments, which answer the turns of a model and reward them.

Users implement the class in `interfaces`; `registry` finds it by name, `workers/` hosts it in Ray actors, which
rollouts call, and `grading/` runs verifiers in processes that can be killed. This file imports nothing, so that a
grading process starts without torch and ray.
"""
