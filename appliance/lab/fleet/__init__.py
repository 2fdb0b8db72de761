"""Several simulated boxes behind a router."""
