"""The simulation: instances, links and memory on a virtual clock."""
