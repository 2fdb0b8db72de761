"""The port between the daemon and those it serves: the API, front ends, observers."""
