"""Predict the memory of a training rank, by a trace on the meta device, and the memory of an engine's rank."""
