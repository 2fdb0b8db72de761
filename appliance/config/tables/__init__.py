"""Tables of the configuration file, a module each, and what all of them are."""
