"""Everything that is checked, predicted and built before the first step of a run."""
