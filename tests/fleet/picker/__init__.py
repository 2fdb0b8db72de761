"""Envoy and llm-d's endpoint picker in front of real boxes, by hand."""
