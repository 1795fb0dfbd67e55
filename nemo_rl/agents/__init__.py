"""Run agent programs: the endpoint that programs call, the environments that start them, NeMo Gym and verifiers."""
