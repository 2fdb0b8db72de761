"""The core's side of front ends: connections, processes, and the calls that these make."""
