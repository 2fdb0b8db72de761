"""The whole appliance under everything at once for as long as one likes: see `__main__`."""
