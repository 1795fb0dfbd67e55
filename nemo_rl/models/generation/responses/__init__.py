"""Continue responses that were started before."""
