"""The HTTP API of the core: admin, batches, health, metrics, and the OpenAPI document."""
