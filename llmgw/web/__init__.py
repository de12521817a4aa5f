"""The admin side: an API for people and tools, and the console."""
