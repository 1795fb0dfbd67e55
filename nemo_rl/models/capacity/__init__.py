"""Predict the memory of a training rank, by a trace on the meta device, and of an engine that generates."""
