"""The demonstration: small models made on the spot, a burst of chats, and proof of identity."""
