"""The appliance under requests that nobody would write: by its document, and byte by byte."""
