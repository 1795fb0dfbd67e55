"""Environments of other libraries, each behind the extra that installs its library."""
