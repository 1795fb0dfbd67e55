"""Provide ranks with torch process groups, collectives, placements of DTensors, and errors that all ranks share."""
