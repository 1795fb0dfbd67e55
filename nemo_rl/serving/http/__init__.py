"""Answer the HTTP requests of the Tinker API and of OpenAI's API."""
