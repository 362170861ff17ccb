"""The holder is told who waits for what lies idle, and who else uses it."""
