"""The dashboard of a fleet: several boxes on one screen, and the way to each one's own."""
