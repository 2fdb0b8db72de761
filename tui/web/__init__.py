"""The dashboard in a browser: each page of it runs the app in a process of its own."""
