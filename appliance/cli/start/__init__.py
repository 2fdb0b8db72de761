"""Commands that bring models into service: from a configuration, a directory or a hub."""
