"""What this process holds is released when its user asks for it from elsewhere."""
