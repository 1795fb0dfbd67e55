"""Train a draft model with the policy. It is an EAGLE-3 head that proposes tokens to an engine (`policy.draft`)."""
