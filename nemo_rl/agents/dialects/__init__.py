"""Translate the APIs that programs use: read requests into `CallRequest`, and write `CallAnswer` as responses."""
