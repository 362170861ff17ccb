"""`reserve-gpu top`."""
