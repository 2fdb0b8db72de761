"""The machine below: sockets, processors, GPUs, logs, systemd, TLS."""
