"""Several boxes as one fleet: what is known of each of them, and which one a request goes to."""
