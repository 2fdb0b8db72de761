"""Requests of clients that mean harm, as tests of several kinds send them."""
