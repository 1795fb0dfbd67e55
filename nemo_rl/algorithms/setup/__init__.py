"""Check, estimate and build what a run needs before its first step."""
