"""The configuration: its schema, how files are read and checked, and what models need."""
