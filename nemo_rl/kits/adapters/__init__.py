"""Environments of other libraries, each with an extra that installs its library."""
