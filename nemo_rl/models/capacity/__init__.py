"""Predict memory: of a rank that trains, of an engine that generates, traced on the meta device."""
