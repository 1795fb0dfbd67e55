"""The APIs that programs speak: they read requests into `CallRequest` and write `CallAnswer`s as responses."""
