"""What each layer costs at each precision or sparsity, measured on data."""
