"""Doors into training systems that bring their own loss: one file a host."""
