"""What %reserve_gpu costs, beside what people would use instead: see __main__.py."""
