"""Three daemons and a Ray cluster of three nodes on one machine (`make test-fleet`)."""
