"""What %reserve_gpu costs, side by side with what people would use instead: see __main__.py."""
