"""The daemon: one machine, its workers, and the requests of the API, on one event loop."""
