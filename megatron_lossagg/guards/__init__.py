"""What each step checks."""
