"""Runs whose policy writes what it learns from: the loop, its stages, and the way of weights to the engines."""
