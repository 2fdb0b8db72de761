"""The HTTP API: OpenAI's dialect in front of an `appliance.service.interface.Service`."""
