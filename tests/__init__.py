"""Tests of reserve_gpu: real processes, files, kernels and bindings, on a stand-in driver."""
