"""What people do with a model: fill in, impute, find outliers, topics; each compared with the tools of the trade."""
