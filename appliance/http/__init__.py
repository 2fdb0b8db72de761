"""HTTP that the core and front ends share: connections, errors, CORS, request ids."""
