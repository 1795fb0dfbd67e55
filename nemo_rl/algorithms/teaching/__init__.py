"""Score the samples of a step with teachers: models of the run, endpoints, or the policy itself."""
