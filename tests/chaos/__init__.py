"""Everything that can go wrong around a whole daemon, at random: see `__main__`."""
