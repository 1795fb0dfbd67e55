"""Torch ranks: process groups, collectives, placements of DTensors, errors that all ranks share."""
