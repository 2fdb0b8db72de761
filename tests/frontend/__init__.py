"""A front end: dialects, fields and models, with stand-ins for the core."""
