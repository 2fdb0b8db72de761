"""Several boxes behind one address: what routers in front of them need."""
