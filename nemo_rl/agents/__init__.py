"""Agent programs: the endpoint that they call, the environments that start them, NeMo Gym and verifiers."""
