"""The lab: the daemon's own machine and policies on a virtual clock and modelled hardware."""
