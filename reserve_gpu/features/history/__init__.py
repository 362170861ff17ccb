"""What is reserved, used and waited for is logged."""
