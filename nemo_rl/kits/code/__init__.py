"""Programs as answers: find them in a response, run them in a sandbox, and grade them with tests."""
